#!/usr/bin/env bash
# sentence-transformers 6.2.0, torch 2.13.0: the dot product of int8 embeddings is an int8 number. The guess was that `util.dot_score`, and a search
# with it, add up in wider numbers, as the function does for float16, or refuse int8, as cos_sim does; quantize_embeddings makes such arrays.
#
# Seen (2026-11-28): sums of 200,000 are kept modulo 256. Of 100 queries whose own document is the nearest by far, semantic_search with dot_score
# finds none; the same codes multiplied in int32 find all. pairwise_dot_score multiplies modulo 256 and adds up in int64, and gives -907 where
# the product is 198,517. Nothing warns. cos_sim and euclidean_sim raise an error that names the type. `.float()` on both sides is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq sentence-transformers==6.2.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from sentence_transformers import util
from sentence_transformers.util.quantization import quantize_embeddings

generator = np.random.default_rng(0)
documents = generator.standard_normal((2000, 256), dtype=np.float32)
documents /= np.linalg.norm(documents, axis=1, keepdims=True)
queries = documents[:100] + 0.05 * generator.standard_normal((100, 256), dtype=np.float32)
largest = np.full(256, np.abs(documents).max())
codes, asked = (quantize_embeddings(rows, precision="int8", ranges=np.stack((-largest, largest))) for rows in (documents, queries))
right = asked.astype(np.int32) @ codes.astype(np.int32).T


def found(first: np.ndarray, second: np.ndarray) -> float:
    """Share of the queries whose own document comes first."""
    hits = util.semantic_search(first, second, top_k=1, score_function=util.dot_score)
    return float(np.mean([hit[0]["corpus_id"] == number for number, hit in enumerate(hits)]))


scores, pairs = util.dot_score(asked, codes), util.pairwise_dot_score(asked, codes[:100])
print(f"sentence-transformers {version('sentence-transformers')}: scores in {scores.dtype}")
print(f"the first query's own document: {right[0, 0]}, dot_score {int(scores[0, 0])}, pairwise_dot_score {int(pairs[0])}")
print(f"own documents found: int8 {found(asked, codes):.0%}, as floats {found(asked.astype(np.float32), codes.astype(np.float32)):.0%}")
assert (scores.numpy() == right.astype(np.int8)).all() and int(pairs[0]) != right[0, 0], "the behaviour has changed"
assert found(asked, codes) < 0.1 and found(asked.astype(np.float32), codes.astype(np.float32)) == 1, "the behaviour has changed"
try:
    util.cos_sim(asked, codes)
except RuntimeError as error:
    print(f"cos_sim: {error}")
else:
    raise AssertionError("the behaviour has changed")
PYTHON
