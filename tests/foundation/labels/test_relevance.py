"""Labels of queries and documents, what is found, and the metrics of rankings against their formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compress.report.intervals import paired, single
from foundation.labels import ranking, relevance
from foundation.measure.metrics import METRICS, metrics

QUERIES, DOCUMENTS = 7, 40


def judgements(seed: int = 0, grades: int = 4) -> list[relevance.Judgement]:
    """Returns judgements of all queries but the last, some of them 0; queries have many documents, documents few queries."""
    random = np.random.default_rng(seed)
    found = []
    for query in range(QUERIES - 1):
        for document in random.choice(DOCUMENTS, 2 + 3 * query, replace=False):
            found.append((query, int(document), int(random.integers(0, grades + 1))))
    return found


def drawn(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(QUERIES + DOCUMENTS, 6)).astype(np.float32)


def by_hand(texts: np.ndarray, known: list[relevance.Judgement]) -> np.ndarray:
    """Returns ndcg@10, mrr@10 and recall@30 of each judged query, from the formulas."""
    unit = texts / np.linalg.norm(texts, axis=1, keepdims=True)
    rows = []
    for query in sorted({query for query, _, _ in known}):
        grades = {document: grade for asked, document, grade in known if asked == query}
        scores = [float(unit[query] @ unit[QUERIES + document]) for document in range(DOCUMENTS)]
        order = sorted(range(DOCUMENTS), key=lambda document: -scores[document])
        gains = [grades.get(document, 0) for document in order]
        dcg, ideal = (
            sum(gain / math.log2(rank + 2) for rank, gain in enumerate(some[:10]))
            for some in (gains, sorted(grades.values(), reverse=True))
        )
        first = next((rank for rank, gain in enumerate(gains[:10], 1) if gain), None)
        relevant = sum(grade > 0 for grade in grades.values())
        rows.append([dcg / ideal if ideal else 0.0, 1 / first if first else 0.0, 1.0 if relevant else 0.0])
    return np.array(rows)


@pytest.mark.parametrize("turned", [False, True])
def test_labels_say_what_was_judged_in_any_order(turned: bool) -> None:
    known = [(document, query, grade) for query, document, grade in judgements()] if turned else judgements()
    sizes = (DOCUMENTS, QUERIES) if turned else (QUERIES, DOCUMENTS)
    labels = relevance.labels_of(*sizes, known)
    most = max(np.bincount([judged[0 if not turned else 1] for judged in known]))
    assert labels.array.shape[1] < 2 + 2 * most  # they stand on the side that needs fewer columns
    order = np.random.default_rng(3).permutation(len(labels))
    found = labels[order].known
    number = labels.array[order, 1].astype(int)
    back = {
        (int(number[row]), int(number[found.documents[place]]), grade)
        for row, grades in zip(found.queries, found.grades, strict=True)
        for place, grade in grades.items()
    }
    assert back == set(known)
    assert labels.count() == len({query for query, _, _ in known})


def test_a_choice_of_rows_is_judged_on_its_own_documents() -> None:
    labels = relevance.labels_of(2, 3, [(0, 0, 1), (0, 2, 2), (1, 1, 1)])
    found = (labels[[0, 1, 2, 4]]).known  # without the second document
    assert found.queries.tolist() == [0]
    assert found.grades == ({0: 1, 1: 2},)
    assert not len(labels[:2].known.queries)
    assert metrics("retrieval", drawn()[:2], labels[:2]) == {"ndcg@10": 0.0, "mrr@10": 0.0, "recall@100": 0.0}


def test_metrics_are_those_of_their_formulas() -> None:
    known = judgements()
    texts, labels = drawn(), relevance.labels_of(QUERIES, DOCUMENTS, known)
    expected = by_hand(texts, known)
    assert 0 < expected[:, 0].min() < expected[:, 0].max() < 1
    np.testing.assert_allclose(labels.values(texts)[0], expected, atol=1e-9)
    found = metrics("retrieval", texts, labels)
    assert list(found) == ["ndcg@10", "mrr@10", "recall@100"]
    np.testing.assert_allclose(list(found.values()), expected.mean(axis=0))
    order = np.random.default_rng(5).permutation(len(texts))
    assert metrics("retrieval", texts[order], labels[order]) == pytest.approx(found)


def test_ranks_beyond_the_cuts_do_not_count() -> None:
    order = [range(150)]
    np.testing.assert_allclose(ranking.of_rankings(order, [{9: 1, 99: 1}]), [[(1 / math.log2(11)) / (1 + 1 / math.log2(3)), 0.1, 1.0]])
    np.testing.assert_allclose(ranking.of_rankings(order, [{10: 1, 100: 1}]), [[0.0, 0.0, 0.5]])
    np.testing.assert_allclose(ranking.of_rankings(order, [{10: 0}]), [[0.0, 0.0, 0.0]])


def test_the_first_documents_are_the_nearest_ones_and_ties_go_to_the_first() -> None:
    texts = drawn()
    unit = texts / np.linalg.norm(texts, axis=1, keepdims=True)
    found = relevance.nearest(texts[:QUERIES], 3 * texts[QUERIES:], 5)
    for query, places in enumerate(found):
        assert places.tolist() == sorted(range(DOCUMENTS), key=lambda document: -float(unit[query] @ unit[QUERIES + document]))[:5]
    assert relevance.nearest(texts[:1], np.ones((4, 6), np.float32), 9).tolist() == [[0, 1, 2, 3]]


def test_overlap_counts_documents_in_common() -> None:
    texts, other, labels = drawn(), drawn(1), relevance.labels_of(QUERIES, DOCUMENTS, judgements())
    turned = texts @ np.linalg.qr(drawn(2)[:6])[0]
    assert labels.overlap(texts, 2 * turned) == 1.0
    ours, theirs = labels.nearest(texts), labels.nearest(other)
    assert len(ours) == labels.count() == QUERIES - 1
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)]
    assert labels.overlap(texts, other) == pytest.approx(float(np.mean(shared)))
    assert 0 < float(np.mean(shared)) < 1


def test_what_a_teacher_finds_becomes_relevant() -> None:
    texts, labels = drawn(), relevance.labels_of(QUERIES, DOCUMENTS, judgements())
    order = np.random.default_rng(4).permutation(len(texts))
    texts, labels = texts[order], labels[order]
    taught = labels.pseudo_labels(texts)
    assert (taught.array[:, :2] == labels.array[:, :2]).all()
    assert taught.count() == QUERIES  # also the one that nobody judged
    assert metrics("retrieval", texts, taught) == {"ndcg@10": pytest.approx(1.0), "mrr@10": 1.0, "recall@100": 1.0}
    assert metrics("retrieval", drawn(9), taught)["ndcg@10"] < 0.6


def test_intervals_draw_queries() -> None:
    texts, other, labels = drawn(), drawn(1), relevance.labels_of(QUERIES, DOCUMENTS, judgements())
    metric = METRICS["ndcg@10"]
    cell, change = single(metric, texts, labels), paired(metric, texts, other, labels)
    ours, theirs = labels.values(texts)[0][:, 0], labels.values(other)[0][:, 0]
    assert cell.n == change.n == QUERIES - 1
    assert cell.value == pytest.approx(ours.mean())
    assert cell.low < cell.value < cell.high
    assert change.difference == pytest.approx(ours.mean() - theirs.mean())
    draws = np.random.default_rng(0).integers(0, QUERIES - 1, (4000, QUERIES - 1))
    resampled = np.quantile(ours[draws].mean(axis=1), [0.025, 0.975])
    np.testing.assert_allclose([cell.low, cell.high], resampled, atol=0.05)  # wider, as there are so few queries
