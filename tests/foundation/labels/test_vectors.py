"""Vectors of texts against written-out loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compress.report.intervals import paired, single
from foundation.labels import vectors
from foundation.labels.tasks import TASKS
from foundation.labels.value import Numbers
from foundation.measure.metrics import metrics, pearson, spearman
from tests.tiny_embedding import vectors as drawn

TASK = "sentence-embedding"


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    dot = sum(float(a) * float(b) for a, b in zip(one, other, strict=True))
    return dot / math.hypot(*one.tolist()) / math.hypot(*other.tolist())


def test_pairs_are_found_in_any_order_and_texts_without_a_partner_are_left_out() -> None:
    labels, texts = vectors.labels_of(np.array([0.1, 0.5, 0.9])), drawn(6)
    assert labels.array.dtype == np.float32
    assert labels.array.tolist() == [[number, np.float32(score)] for number, score in enumerate((0.1, 0.5, 0.9)) for _ in range(2)]
    order = [4, 3, 0, 5, 2]  # the text 1 is missing
    cosines, scores = labels[order].values(texts[order])
    assert scores.tolist() == [np.float32(0.5), np.float32(0.9)]
    assert cosines[:, 0] == pytest.approx([cosine(texts[2], texts[3]), cosine(texts[4], texts[5])], abs=1e-6)
    assert labels[order].count() == labels[order].count() == 2


def test_metrics_are_those_of_the_cosines() -> None:
    labels, texts = vectors.labels_of(np.random.default_rng(1).random(20)), drawn(40)
    values = np.array([cosine(texts[row], texts[row + 1]) for row in range(0, 40, 2)])
    found = metrics(TASK, texts, labels)
    assert list(found) == ["spearman", "pearson"]
    assert found["spearman"] == pytest.approx(spearman(values, labels.array[::2, 1]))
    assert found["pearson"] == pytest.approx(pearson(values, labels.array[::2, 1]), abs=1e-6)
    assert metrics(TASK, 3 * texts, labels)["pearson"] == pytest.approx(found["pearson"])


def test_intervals_draw_whole_pairs() -> None:
    from foundation.measure.metrics import METRICS

    labels, texts, others = vectors.labels_of(np.random.default_rng(1).random(20)), drawn(40), drawn(40, seed=2)
    (values, scores), (after, _) = (labels.values(found) for found in (texts, others))
    metric = METRICS["spearman"]
    assert single(metric, texts, labels) == single(metric, values, Numbers(scores))
    assert paired(metric, texts, others, labels) == paired(metric, values, after, Numbers(scores))


def test_the_distance_is_relative_and_far_vectors_are_other_predictions() -> None:
    before, after = np.array([[3.0, 4.0], [0.6, 0.8], [1.0, 0.0]]), np.array([[3.0, 4.0], [0.8, 0.6], [1.0, 0.05]])
    changed, apart = TASKS[TASK].answer.differences(before, after)
    assert apart == pytest.approx([0.0, math.sqrt(2 - 2 * 0.96), 0.05])
    assert changed.tolist() == [False, True, False]


def test_neighbours_are_the_nearest_others() -> None:
    texts = drawn(9)
    for row, found in enumerate(vectors.neighbours(texts, 3)):
        others = [other for other in range(9) if other != row]
        assert found.tolist() == sorted(others, key=lambda other: -cosine(texts[row], texts[other]))[:3]


def test_overlap_and_agreement_are_1_for_turned_vectors_and_less_for_others() -> None:
    texts = drawn(30)
    turned = texts @ np.linalg.qr(drawn(4, seed=3))[0]
    assert vectors.overlap(texts, 2 * turned, 5) == 1.0
    assert vectors.agreement(texts, 2 * turned) == pytest.approx(1.0)
    other = drawn(30, seed=5)
    shared = [len(set(a) & set(b)) / 5 for a, b in zip(vectors.neighbours(texts, 5), vectors.neighbours(other, 5), strict=True)]
    assert vectors.overlap(texts, other, 5) == pytest.approx(float(np.mean(shared)))
    every = [(i, j) for i in range(30) for j in range(i)]
    expected = np.corrcoef([cosine(texts[i], texts[j]) for i, j in every], [cosine(other[i], other[j]) for i, j in every])[0, 1]
    assert vectors.agreement(texts, other) == pytest.approx(expected)


def test_scores_become_the_cosines_of_other_vectors() -> None:
    labels, texts = vectors.labels_of(np.array([0.1, 0.5])), drawn(4)
    changed = labels.pseudo_labels(texts)
    assert changed.array[:, 0].tolist() == labels.array[:, 0].tolist()
    assert changed.array[:, 1] == pytest.approx(np.repeat([cosine(texts[0], texts[1]), cosine(texts[2], texts[3])], 2), abs=1e-6)
