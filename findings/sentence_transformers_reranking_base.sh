#!/usr/bin/env bash
# sentence-transformers 6.2.0: in CrossEncoderRerankingEvaluator with always_rerank_positives=False a reranker that leaves the order as it is doubles
# NDCG. The guess was that "Base" and "Reranked" are the same measures of two orders, so that the same order has the same figures.
#
# Seen (2026-11-28): for the base, relevant documents that the first stage missed count, in the last places. For the reranker they do not exist: the
# best possible order has only the relevant documents that were found. With 3 of 10 relevant documents among 20, in the same order, NDCG@10 goes from
# 0.14 to 0.30 and MAP from 0.28 to 0.26; only MRR stays. The model card gets the difference as the improvement by the reranker. With
# always_rerank_positives=True the figures agree, since the missed documents are given to the reranker.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq sentence-transformers==6.2.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

QUERIES, FOUND, RELEVANT, HITS = 200, 20, 10, 3


def keep(pairs: list[list[str]], **_: object) -> np.ndarray:
    """Scores that leave documents in the order of the first stage, which their names say; what it did not find comes last."""
    return np.array([-float(document.split("#")[1]) for _, document in pairs])


generator = np.random.default_rng(0)
samples = []
for query in range(QUERIES):
    documents = [f"{query} document #{rank}" for rank in range(FOUND)]
    hits = [documents[rank] for rank in sorted(generator.choice(FOUND, HITS, replace=False))]
    missed = [f"{query} missed #{FOUND + number}" for number in range(RELEVANT - HITS)]
    samples.append({"query": f"query {query}", "positive": hits + missed, "documents": documents})
model = SimpleNamespace(predict=keep, model_card_data=Mock())
print(f"sentence-transformers {version('sentence-transformers')}, {HITS} of {RELEVANT} relevant documents among the {FOUND} found, the same order")
seen = {}
for every in (True, False):
    metrics = CrossEncoderRerankingEvaluator(samples, always_rerank_positives=every, write_csv=False)(model)
    seen[every] = {name: float(value) for name, value in metrics.items()}
    print(f"always_rerank_positives={every}:", {name: round(value, 3) for name, value in seen[every].items()})
for name in ("map", "mrr@10", "ndcg@10"):
    assert abs(seen[True][name] - seen[True][f"base_{name}"]) < 1e-9
    assert abs(seen[True][f"base_{name}"] - seen[False][f"base_{name}"]) < 1e-9
wrong = seen[False]
assert wrong["ndcg@10"] > 2 * wrong["base_ndcg@10"] and wrong["map"] < 0.95 * wrong["base_map"], "the behaviour has changed"
assert abs(wrong["mrr@10"] - wrong["base_mrr@10"]) < 1e-9
PYTHON
