#!/usr/bin/env bash
# beir 2.2.0: NDCG, MAP, recall and precision are means over the queries that got an answer, MRR and accuracy of the same class are means over all.
# The guess was that a query without results counts 0 in every metric, and that names of queries and documents are two name spaces.
#
# Seen (2026-11-28): a retriever that answers 1 of 4 queries, perfectly, has NDCG@10 = 1 and MRR@10 = 0.25. So leaving hard queries without an answer
# (a filter, a threshold on scores, BM25 without a common word) raises NDCG. A document with the same name as the query is taken out of the
# results before they are measured, and out of the caller's dictionary: with queries and documents numbered from 0, a perfect run has
# NDCG@10 = 0 if the answer to query i is document i. That is a message at INFO; MRR, called first, gives 1, and 0 afterwards. ir-measures 0.4.3
# counts both runs over all queries and names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-deps beir==2.2.0 pytrec-eval-terrier==0.5.11 ir-measures==0.4.3 numpy==2.4.6 tqdm==4.67.1
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import ir_measures
from beir.retrieval.evaluation import EvaluateRetrieval

K = [10]


def measured(qrels: dict[str, dict[str, int]], results: dict[str, dict[str, float]]) -> dict[str, float]:
    """MRR and NDCG of beir, in this order, and MRR once more, next to both of ir-measures."""
    other = ir_measures.calc_aggregate([ir_measures.nDCG @ 10, ir_measures.RR @ 10], qrels, results)
    scores = {f"ir-measures {measure}": float(value) for measure, value in other.items()}
    scores["MRR"] = EvaluateRetrieval.evaluate_custom(qrels, results, K, "mrr")["MRR@10"]
    ndcg, _, recall, _ = EvaluateRetrieval.evaluate(qrels, results, K)
    scores |= {"NDCG": ndcg["NDCG@10"], "recall": recall["Recall@10"]}
    scores["MRR afterwards"] = EvaluateRetrieval.evaluate_custom(qrels, results, K, "mrr")["MRR@10"]
    return scores


print(f"beir {version('beir')}")
qrels = {f"q{number}": {f"d{number}": 1} for number in range(4)}
scores = measured(qrels, {"q0": {"d0": 1.0}})
print("1 of 4 queries answered:", scores)
assert scores["NDCG"] == scores["recall"] == 1, "the behaviour has changed"
assert scores["MRR"] == scores["ir-measures nDCG@10"] == scores["ir-measures RR@10"] == 0.25, "the behaviour has changed"

same = {str(number): {str(number): 1} for number in range(4)}
scores = measured(same, {str(number): {str(number): 1.0, str(number + 4): 0.5} for number in range(4)})
print("query i, document i:", scores)
assert scores["NDCG"] == scores["recall"] == scores["MRR afterwards"] == 0, "the behaviour has changed"
assert scores["MRR"] == scores["ir-measures nDCG@10"] == scores["ir-measures RR@10"] == 1, "the behaviour has changed"
PYTHON
