"""Recall of captions against a loop over every order of equal cosines, and the form of the labels."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report.intervals import paired, single
from foundation.labels import captions
from foundation.measure.metrics import METRICS, metrics

TASK = "image-text-retrieval"
NEAR = 1.5 / 1100
"""Among so many cosines one may be equal to that of the right row but for the last bits."""
CORNERS = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], np.float32)


def labels_of(owners: list[int], images: int) -> np.ndarray:
    """Labels of images 0, 1, ... and then of captions that belong to these."""
    sides = np.repeat([0, 1], [images, len(owners)])
    return captions.labels_of(sides, np.array([*range(images), *owners]))


def chance_of_a_hit(cosines: list[float], right: list[bool], depth: int) -> float:
    """Share of the orders of all items, largest cosine first, that have a right one among the first."""
    orders = [order for order in permutations(range(len(cosines))) if all(cosines[a] >= cosines[b] for a, b in pairwise(order))]
    return sum(any(right[item] for item in order[:depth]) for order in orders) / len(orders)


def naive(vectors: np.ndarray, labels: np.ndarray, depth: int) -> tuple[float, float]:
    """Recall of images by captions, and of captions by images."""
    images, texts = ([row for row in range(len(labels)) if labels.array[row, 0] == side] for side in (0, 1))
    recalls = []
    for asking, asked in ((texts, images), (images, texts)):
        hits = []
        for row in asking:
            right = [labels.array[other, 1] == labels.array[row, 1] for other in asked]
            if any(right):
                cosines = [float(vectors[row] @ vectors[other]) for other in asked]
                hits.append(chance_of_a_hit(cosines, right, depth))
        recalls.append(sum(hits) / len(hits) if hits else 0.0)
    return recalls[0], recalls[1]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    images, texts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    owners = draw(st.lists(st.integers(0, images), min_size=texts, max_size=texts))  # of the last number there is no image
    corners = draw(st.lists(st.integers(0, 3), min_size=images + texts, max_size=images + texts))
    order = draw(st.permutations(range(images + texts)))
    return CORNERS[corners][order], labels_of(owners, images)[order]


@given(drawn())
def test_recall_is_the_mean_over_all_orders_of_equal_cosines(case: tuple[np.ndarray, np.ndarray]) -> None:
    vectors, labels = case
    found = {name: METRICS[name].of(*labels.values(vectors)) for name in captions.FIGURES}
    expected = {depth: naive(vectors, labels, depth) for depth in captions.DEPTHS}
    for depth, (of_images, of_captions) in expected.items():
        assert found[f"text_to_image_recall@{depth}"] == pytest.approx(of_images)
        assert found[f"image_to_text_recall@{depth}"] == pytest.approx(of_captions)
    assert found["mean_recall"] == pytest.approx(np.mean([*expected.values()]))


@pytest.mark.whole
def test_many_rows_are_counted_as_sorting_counts_them() -> None:
    random = np.random.default_rng(0)
    owners = random.permutation(np.repeat(np.arange(1100), random.integers(1, 4, 1100))).tolist()  # more than one chunk
    labels = labels_of(owners, 1100)
    vectors = random.normal(size=(len(labels), 12)).astype(np.float32)
    vectors[1100:] += 1.5 * vectors[owners]
    found = metrics(TASK, vectors, labels)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit[:1100] @ unit[1100:].T
    own = np.arange(1100)[:, None] == np.array(owners)[None, :]
    for depth in (1, 5, 10):
        nearest = np.argsort(-cosines, axis=1)[:, :depth]
        assert found[f"image_to_text_recall@{depth}"] == pytest.approx(
            np.take_along_axis(own, nearest, axis=1).any(axis=1).mean(), abs=NEAR
        )
        nearest = np.argsort(-cosines, axis=0)[:depth]
        assert found[f"text_to_image_recall@{depth}"] == pytest.approx(
            np.take_along_axis(own, nearest, axis=0).any(axis=0).mean(), abs=NEAR
        )
    assert list(found) == list(captions.FIGURES)
    assert 0.1 < found["mean_recall"] < 0.95


def test_vectors_that_are_all_the_same_get_what_chance_gets() -> None:
    labels = labels_of([number for number in range(20) for _ in range(5)], 20)
    found = metrics(TASK, np.ones((120, 3), np.float32), labels)
    for depth in (1, 5, 10):
        assert found[f"text_to_image_recall@{depth}"] == pytest.approx(depth / 20)
    assert found["image_to_text_recall@1"] == pytest.approx(5 / 100)


def test_the_same_caption_in_another_batch_is_still_the_same() -> None:
    labels = labels_of([0, 1], 2)
    vectors = np.array([[1, 0], [0, 1], [1, 1], [1, 1 + 1e-7]], np.float32)
    assert metrics(TASK, vectors, labels)["text_to_image_recall@1"] == pytest.approx(0.5)


def test_images_are_drawn_with_their_captions() -> None:
    random = np.random.default_rng(1)
    labels = labels_of(np.repeat(np.arange(30), 3).tolist(), 30)
    vectors = random.normal(size=(120, 4)).astype(np.float32)
    vectors[30:] += 0.6 * np.repeat(vectors[:30], 3, axis=0)
    noisy = vectors + random.normal(scale=0.3, size=vectors.shape).astype(np.float32)
    metric = METRICS["mean_recall"]
    one = single(metric, vectors, labels)
    assert one.n == labels.count() == 30
    assert one.low < one.value == metric.of(*labels.values(vectors)) < one.high
    change = paired(metric, vectors, noisy, labels)
    assert change.difference == pytest.approx(metric.of(*labels.values(vectors)) - metric.of(*labels.values(noisy)))
    assert paired(metric, vectors, vectors, labels).high == 0


def test_answers_become_the_images_of_captions() -> None:
    labels = labels_of([0, 1, 2], 3)
    vectors = np.array([[1, 0], [0, 1], [-1, 0], [0, 1], [0, 1], [1, 0.1]], np.float32)
    told = labels.pseudo_labels(vectors)
    assert told.array[3:, 1].tolist() == [1, 1, 0]
    assert (told.array[:3] == labels.array[:3]).all()
    assert METRICS["text_to_image_recall@1"].of(*told.values(vectors)) == 1


def test_what_two_models_find_alike_is_counted_on_both_sides() -> None:
    random = np.random.default_rng(2)
    labels = labels_of([0, 1, 2, 3] * 2, 4)
    vectors = random.normal(size=(12, 3)).astype(np.float32)
    assert labels.overlap(vectors, vectors) == 1
    turned = np.where(labels.array[:, :1] == 0, -vectors, vectors)
    assert labels.overlap(vectors, turned, 1) == 0  # the nearest is now the farthest
    swapped = vectors.copy()
    swapped[:4] = vectors[[1, 0, 2, 3]]
    one = labels.overlap(vectors, swapped, 1)
    rows = labels.nearest(vectors, 1), labels.nearest(swapped, 1)
    assert one == pytest.approx(float((rows[0] == rows[1]).mean()))
    assert labels.nearest(vectors, 10)[0].tolist().count(-1) == 2  # eight captions
