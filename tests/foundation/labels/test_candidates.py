"""Candidates in order, and the metrics of that order, against the formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compress.report.intervals import paired, single
from foundation.labels import candidates
from foundation.measure.metrics import metrics

TASK = "reranking"
QUERIES, COUNT = 6, 15
KNOWN = [[3, 1, 1], [2] * 12, [1], [0, 0], [4, 2, 0], [1, 1]]
"""Grades of all documents that were judged, by query; not all of them are candidates."""


def pairs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores and labels of candidates; the candidates of a query have about half of its grades."""
    random = np.random.default_rng(seed)
    queries, grades = [], []
    for query, known in enumerate(KNOWN):
        among = [*known[::2], *[0] * COUNT][:COUNT]
        queries += [query] * COUNT
        grades += random.permutation(among).tolist()
    return random.normal(size=(QUERIES * COUNT, 1)).astype(np.float32), candidates.labels_of(queries, grades, KNOWN)


def by_hand(scores: np.ndarray, labels: np.ndarray) -> list[list[float]]:
    """Returns ndcg@10 and mrr@10 of each query."""
    rows = []
    for query, known in enumerate(KNOWN):
        mine = [row for row in range(len(labels)) if labels.array[row, 1] == query]
        gains = [int(labels.array[row, 2]) for row in sorted(mine, key=lambda row: (-float(scores[row, 0]), row))]
        dcg, ideal = (
            sum(gain / math.log2(rank + 2) for rank, gain in enumerate(some[:10])) for some in (gains, sorted(known, reverse=True))
        )
        first = next((rank for rank, gain in enumerate(gains[:10], 1) if gain), None)
        rows.append([dcg / ideal if ideal else 0.0, 1 / first if first else 0.0])
    return rows


def test_labels_are_told_from_those_of_other_tasks() -> None:
    labels = pairs()[1]
    assert labels.count() == QUERIES


def test_metrics_are_those_of_their_formulas_in_any_order_of_the_rows() -> None:
    scores, labels = pairs()
    expected = np.array(by_hand(scores, labels))
    assert 0 < expected[:3, 0].min() < expected[:, 0].max() < 1
    np.testing.assert_allclose(labels.values(scores)[0][:, :2], expected, atol=1e-9)
    assert metrics(TASK, scores, labels) == pytest.approx(dict(zip(("ndcg@10", "mrr@10"), expected.mean(axis=0), strict=True)))
    order = np.random.default_rng(2).permutation(len(labels))
    assert metrics(TASK, scores[order], labels[order]) == pytest.approx(metrics(TASK, scores, labels))


def test_equal_scores_keep_the_order_of_the_first_search() -> None:
    scores, labels = pairs()
    found = labels.ordered(np.zeros_like(scores))
    assert [query.rows.tolist() for query in found] == [list(range(COUNT * query, COUNT * (query + 1))) for query in range(QUERIES)]
    np.testing.assert_allclose(labels.values(0 * scores)[0][:, :2], by_hand(0 * scores, labels), atol=1e-9)


def test_a_perfect_order_of_candidates_is_not_worth_more_than_they_are() -> None:
    labels = pairs()[1]
    found = labels.values(labels.array[:, 2:3])[0]
    assert found[2, 0] == 1.0  # all that is relevant is among the candidates
    assert 0 < found[1, 0] < 1
    assert found[3].tolist()[:2] == [0.0, 0.0]


def test_the_order_of_a_teacher_becomes_the_grades() -> None:
    scores, labels = pairs()
    taught = labels.pseudo_labels(scores)
    assert (taught.array[:, :2] == labels.array[:, :2]).all()
    assert metrics(TASK, scores, taught) == {"ndcg@10": pytest.approx(1.0), "mrr@10": 1.0}
    assert metrics(TASK, -scores, taught)["ndcg@10"] < 0.7
    first = taught.ordered(scores)[0]
    assert first.grades[:11] == (10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)


def test_intervals_draw_queries() -> None:
    (scores, labels), (other, _) = pairs(), pairs(1)
    from foundation.measure.metrics import METRICS

    cell, change = single(METRICS["ndcg@10"], scores, labels), paired(METRICS["ndcg@10"], scores, other, labels)
    ours, theirs = labels.values(scores)[0][:, 0], labels.values(other)[0][:, 0]
    assert cell.n == change.n == QUERIES
    assert cell.low < cell.value == pytest.approx(ours.mean())
    assert change.difference == pytest.approx(ours.mean() - theirs.mean())
