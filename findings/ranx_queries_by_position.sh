#!/usr/bin/env bash
# ranx 0.3.21: `evaluate` with dictionaries pairs the queries of judgements and run by their positions. The guess was that a query's results are
# measured against the judgements of the query with the same name, since both are dictionaries whose keys are checked to be equal.
#
# Seen (2026-11-28): the values of the two dictionaries are taken one after another. A perfect run whose queries stand in another order (as they do
# when they were searched in parallel, or sorted by length) is measured against the judgements of other queries: nDCG@10 falls from 1 to about 0.
# Nothing warns. Qrels and Run objects of the same dictionaries are sorted by name and give 1; one dictionary and one object are mixed up as well.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq ranx==0.3.21
NUMBA_CACHE_DIR="$folder/numba" "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import random
from importlib.metadata import version

from ranx import Qrels, Run, evaluate

names = [f"q{number:03d}" for number in range(200)]
qrels = {name: {f"{name}-a": 1, f"{name}-b": 1} for name in names}
perfect = {name: {f"{name}-a": 2.0, f"{name}-b": 1.0} for name in names}
mixed = dict(random.Random(0).sample(list(perfect.items()), len(names)))
assert mixed == perfect and qrels.keys() == mixed.keys()
scores = {
    "same order": evaluate(qrels, perfect, "ndcg@10"),
    "other order": evaluate(qrels, mixed, "ndcg@10"),
    "other order, Run object": evaluate(qrels, Run(mixed), "ndcg@10"),
    "other order of judgements, Run object": evaluate(dict(reversed(qrels.items())), Run(perfect), "ndcg@10"),
    "other order, both objects": evaluate(Qrels(qrels), Run(mixed), "ndcg@10"),
}
print(f"ranx {version('ranx')}, nDCG@10 of a perfect run:", scores)
assert scores["same order"] == scores["other order, Run object"] == scores["other order, both objects"] == 1, "the behaviour has changed"
assert scores["other order"] < 0.05 and scores["other order of judgements, Run object"] < 0.05, "the behaviour has changed"
PYTHON
