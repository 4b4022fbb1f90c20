"""Metrics of rankings, computed for each query by trec_eval (pytrec_eval: https://arxiv.org/abs/1805.01597).

For the documents retrieved for a query, d_1 nearest, with their judged grades g (0: not relevant, or not judged):

    ndcg@10    = DCG(g_1 ... g_10) / DCG(the 10 largest grades of the query)     DCG = sum_i g_i / log2(1 + i); the figure of BEIR
    mrr@10     = 1 / i of the first d_i with g_i > 0 among the first 10, else 0
    recall@100 = how many documents with g > 0 are among the first 100 / how many there are

The figure of a model is the mean over the queries that have a judgement. Intervals draw queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.form import Figure

DEEPEST = 100
FIGURES = ("ndcg@10", "mrr@10", "recall@100")
"""Names of the metrics, in the order of the columns of `of_rankings`."""


def of_rankings(places: Sequence[Sequence[int]], grades: Sequence[Mapping[int, int]]) -> Array:
    """Returns the metrics of each query, float64 `[q, 3]`.

    Args:
        places: Documents found for each query, the best first.
        grades: Grades of the judged documents of each query, by document; also of those that were not found.
    """
    from pytrec_eval import RelevanceEvaluator

    qrels = {str(query): {str(document): grade for document, grade in known.items()} for query, known in enumerate(grades)}
    whole, first = ({str(query): _scores(order[:count]) for query, order in enumerate(places)} for count in (DEEPEST, 10))
    deep = RelevanceEvaluator(qrels, {"ndcg_cut.10", "recall.100"}).evaluate(whole)
    short = RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(first)  # it has no cut of its own
    names = [str(query) for query in range(len(places))]
    rows = [(deep[name]["ndcg_cut_10"], short[name]["recip_rank"], deep[name]["recall_100"]) for name in names]
    return np.array(rows, np.float64).reshape(len(rows), len(FIGURES))


def _scores(order: Sequence[int]) -> dict[str, float]:
    """Returns scores that make trec_eval rank documents in this order: it sorts by score, and ties by name."""
    return {str(document): float(len(order) - rank) for rank, document in enumerate(order)}


def _mean_of(place: int) -> Figure:
    return lambda figures, _: float(figures[:, place].mean()) if len(figures) else 0.0


METRICS: Mapping[str, Figure] = {name: _mean_of(place) for place, name in enumerate(FIGURES)}
"""Means over the queries of the metrics of `of_rankings`; 0 without a judged query."""
