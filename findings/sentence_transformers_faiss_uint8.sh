#!/usr/bin/env bash
# sentence-transformers 6.2.0: searching uint8 embeddings with faiss finds less than searching embeddings of one bit. The guess was that both
# 8-bit formats find nearly what floats do; the documentation offers uint8 for faiss as it offers int8 for usearch.
#
# Seen (2026-11-27): `semantic_search_faiss` takes inner products of the codes 0 to 255. Their mean is not 0, so a document's score is mostly the
# sum of its codes, whatever the query. Of the ten nearest of 2,000 vectors it finds one or two, and rescoring chooses among the same few.
# usearch with int8 codes, which lie around 0, finds seven, or nine with rescoring; faiss with one bit, by Hamming distance, finds three.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq sentence-transformers==6.2.0 transformers==5.23.0 torch==2.13.0 faiss-cpu==1.15.1 usearch==2.26.6 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import sentence_transformers
from sentence_transformers.util.quantization import quantize_embeddings, semantic_search_faiss, semantic_search_usearch

generator = np.random.default_rng(0)


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


documents = unit(generator.standard_normal((2000, 256)))
queries = unit(documents[:100] + 0.06 * generator.standard_normal((100, 256)))
nearest = [set(np.argsort(-scores)[:10].tolist()) for scores in queries @ documents.T]
ranges = np.vstack((documents.min(axis=0), documents.max(axis=0)))  # calibrated on the documents, as advised


def recall(search: object, precision: str, rescore: bool) -> float:
    codes = quantize_embeddings(documents, precision, ranges=ranges)
    given = {"ranges": ranges} if precision.endswith("int8") else {}
    hits, _ = search(queries, corpus_embeddings=codes, corpus_precision=precision, top_k=10, rescore=rescore, exact=True, **given)
    return float(np.mean([len(best & {hit["corpus_id"] for hit in found}) / 10 for best, found in zip(nearest, hits, strict=True)]))


seen = {}
for name, search, precision in (
    ("faiss, uint8", semantic_search_faiss, "uint8"),
    ("faiss, one bit", semantic_search_faiss, "ubinary"),
    ("usearch, int8", semantic_search_usearch, "int8"),
):
    seen[name] = [recall(search, precision, rescore) for rescore in (False, True)]
    print(f"sentence-transformers {sentence_transformers.__version__}, {name}: recall@10 {seen[name][0]:.2f}, rescored {seen[name][1]:.2f}")
assert seen["usearch, int8"][1] > 0.85 and seen["faiss, one bit"][1] > 0.25
assert max(seen["faiss, uint8"]) < 0.2 < seen["faiss, one bit"][0], "the behaviour has changed"
PYTHON
