#!/usr/bin/env bash
# milvus-lite 3.2.2 (the engine rewritten in Python), pymilvus 3.0.2: searches by range, by group and by BM25, and four filters, give other rows than in 2.5.1.
# The guess was what its page says, that code can move between it and a Milvus server with minimal changes: the same call finds the same rows.
#
# Seen (2026-12-01), all indexes FLAT, so that nothing is approximate. A range search with an inner bound (range_filter) takes the 5 * limit nearest rows and
# drops those outside of the range: of 1,000 rows between two distances none comes back with limit=10 or 100, and all 300 with limit=300. A search grouped by
# a field takes the 10 * limit nearest: where the 300 rows next to the query are of one document, ten groups are asked for, and one comes back.
# BM25 counts words in each flushed part of a collection separately (a TODO in the code): the best document changes with the moment of the flush, since a word
# that is rare in one part counts 350 times as much there. BM25 scores are negative, so that a threshold on them drops all rows, or none.
# Filters: 0.3 in a FLOAT field is not == 0.3, but > 0.3 (it is compared as a double). Integers are divided as real numbers. A JSON true is 1, and JSON != drops
# rows without the key. No error is raised. No public issue was found (of #343, the signs of distances, L2 is repaired and BM25 is not).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for pair in "3.2.2 3.0.2" "2.5.1 2.6.3"; do
    read -r lite client <<<"$pair"
    python3 -m venv "$folder/$lite"
    "$folder/$lite/bin/pip" install -qq --no-compile milvus-lite==$lite pymilvus==$client numpy==2.4.6 setuptools==80.9.0
    OMP_NUM_THREADS=1 "$folder/$lite/bin/python" -W ignore - "$folder/$lite" <<'PYTHON' 2>"$folder/log" || { tail -30 "$folder/log"; exit 1; }
import logging
import sys
from importlib.metadata import version

import numpy as np
from pymilvus import DataType, Function, FunctionType, MilvusClient

logging.disable(logging.CRITICAL)
generator = np.random.default_rng(0)
changed = "the behaviour has changed"
new = version("milvus-lite").startswith("3")
client = MilvusClient(f"{sys.argv[1]}/store.db")


def store(name, parts, flush=False, text=False, **fields):
    """A collection of vectors, or of texts with BM25, that is inserted in parts."""
    schema = MilvusClient.create_schema(auto_id=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    for field, kind in fields.items():
        schema.add_field(field, kind)
    index = client.prepare_index_params()
    if text:
        schema.add_field("text", DataType.VARCHAR, max_length=1000, enable_analyzer=True)
        schema.add_field("terms", DataType.SPARSE_FLOAT_VECTOR)
        schema.add_function(Function(name="f", function_type=FunctionType.BM25, input_field_names=["text"], output_field_names=["terms"]))
        index.add_index("terms", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25")
    else:
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=len(parts[0][0]["vector"]))
        index.add_index("vector", index_type="FLAT", metric_type="L2")
    client.create_collection(name, schema=schema, index_params=index)
    for part in parts:
        client.insert(name, part)
        if flush:
            client.flush(name)
    client.load_collection(name)


print(f"milvus-lite {version('milvus-lite')}, pymilvus {version('pymilvus')}")
vectors = generator.normal(size=(5000, 32)).astype(np.float32)
query = generator.normal(size=32).astype(np.float32)
rows = [{"id": row, "vector": vector.tolist()} for row, vector in enumerate(vectors)]
store("range", [rows[:2500], rows[2500:]])
ordered = np.sort(((vectors - query) ** 2).sum(1))
bounds = {"range_filter": float(ordered[1000]), "radius": float(ordered[2000])}
found = {}
for limit in (10, 100, 300):
    search = {"metric_type": "L2", "params": bounds}
    found[limit] = len(client.search("range", data=[query.tolist()], anns_field="vector", limit=limit, search_params=search)[0])
print(f"range search, 1,000 rows lie between the bounds; rows found by limit: {found}")
assert found == ({10: 0, 100: 0, 300: 300} if new else {10: 10, 100: 100, 300: 300}), changed

near = [{"id": row, "vector": (3 * (row // 300) + 0.3 * generator.normal(size=8)).tolist(), "document": row // 300} for row in range(3000)]
store("group", [near[:1500], near[1500:]], document=DataType.INT64)
search = dict(anns_field="vector", limit=10, group_by_field="document", output_fields=["document"])
[hits] = client.search("group", data=[[0.0] * 8], **search)
groups = [hit["entity"]["document"] for hit in hits]
print(f"ten groups of ten documents: {groups}")
assert groups == ([0] if new else list(range(10))), changed

notes = [{"id": note, "text": f"quantization of network number{note}"} for note in range(50)]
notes[7]["text"] = "quantization quantization quantization of networks"
long = "a report about music, weather, sports, traffic, gardens, and, in one word, quantization"
others = [{"id": 100 + other, "text": long if other == 5 else f"a report about music number{other}"} for other in range(50)]
best = {}
for name, parts, flush in (("no flush", [notes, others], False), ("one flush", [notes + others], True), ("two flushes", [notes, others], True)):
    store(name.replace(" ", "_"), parts, flush, text=True)
    [hits] = client.search(name.replace(" ", "_"), data=["quantization"], anns_field="terms", limit=2)
    best[name] = [(hit["id"], round(hit["distance"], 3)) for hit in hits]
    print(f"BM25, {name}: best documents and scores {best[name]}")
assert best["no flush"] == best["one flush"] and best["one flush"][0][0] == 7
assert (best["two flushes"][0][0] == 105) == new and all((hit[1] < 0) == new for hits in best.values() for hit in hits), changed

values = [{"n": 1}, {"n": True}, {"n": 0}, {"n": False}, {}]
table = [{"id": row, "vector": [1.0 * row, 0.0], "float": 0.1 * row, "integer": row, "json": values[row]} for row in range(5)]
store("filters", [table], float=DataType.FLOAT, integer=DataType.INT64, json=DataType.JSON)
filters = {  # filter: rows in 3.2.2, rows in 2.5.1
    "float == 0.3": ([], [3]),
    "float > 0.3": ([3, 4], [4]),
    "integer / 2 == 1": ([2], [2, 3]),
    'json["n"] == 1': ([0, 1], [0]),
    'json["n"] == false': ([2, 3], [3]),
    'json["n"] != 1': ([2, 3], [1, 2, 3, 4]),
}
for filter, expected in filters.items():
    seen = sorted(hit["id"] for hit in client.query("filters", filter=filter, output_fields=["id"]))
    print(f"{filter}: rows {seen}")
    assert seen == expected[0 if new else 1], changed
PYTHON
done
