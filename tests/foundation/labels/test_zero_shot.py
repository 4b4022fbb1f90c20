"""Classes that images are found in, against loops that follow the definition, and the form of the labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report.intervals import paired, single, wilson
from foundation.labels import zero_shot
from foundation.measure.metrics import METRICS, metrics
from tests.tiny_towers import TASK


def rows(seed: int, images: int, classes: int, templates: int, told: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns vectors and labels in a random order; only the first `told` classes have texts."""
    random = np.random.default_rng(seed)
    sides = np.array([zero_shot.IMAGE] * images + [zero_shot.TEXT] * told * templates)
    of_images = random.integers(0, classes, images)
    labels = zero_shot.labels_of(sides, np.concatenate([of_images, np.repeat(np.arange(told), templates)]))
    order = random.permutation(len(labels))
    return random.normal(size=(len(labels), 5)).astype(np.float32)[order] * random.uniform(0.1, 9, (len(labels), 1)), labels[order]


def naive(found: np.ndarray, labels: np.ndarray) -> list[tuple[int, int, list[float]]]:
    """Returns row, true class and the cosines with all classes of each image, by loops over single numbers."""
    of_class: dict[int, list[np.ndarray]] = {}
    for vector, (side, number, _) in zip(found.astype(float), labels.array.tolist(), strict=True):
        if side == 1:
            of_class.setdefault(int(number), []).append(vector / np.sqrt((vector * vector).sum()))
    means = {number: sum(of) / len(of) for number, of in sorted(of_class.items())}
    answers = []
    for row, (vector, (side, number, _)) in enumerate(zip(found.astype(float), labels.array.tolist(), strict=True)):
        if side == 0 and int(number) in means:
            cosines = [float(vector @ mean / np.sqrt((vector * vector).sum() * (mean * mean).sum())) for mean in means.values()]
            answers.append((row, int(number), cosines))
    return answers


@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(1, 8), st.integers(1, 3), st.data())
def test_images_are_told_as_loops_tell_them(seed: int, images: int, classes: int, templates: int, data: st.DataObject) -> None:
    found, labels = rows(seed, images, classes, templates, told := data.draw(st.integers(1, classes)))
    expected = naive(found, labels)
    cosines, own = labels.values(found)
    assert cosines.shape == (len(expected), told)
    np.testing.assert_allclose(cosines, np.array([of for _, _, of in expected]).reshape(-1, told), atol=1e-9)
    assert own.tolist() == [number for _, number, _ in expected]  # the told classes are 0, 1, ...: a column is a class
    assert labels.count() == len(expected)
    changed = labels.pseudo_labels(found)
    for row, _, of in expected:
        assert changed.array[row, 1] == int(np.argmax(of))
    untouched = sorted(set(range(len(labels))) - {row for row, _, _ in expected})
    assert (changed.array[untouched] == labels.array[untouched]).all()
    if expected:
        figures = metrics(TASK, found, labels)
        assert figures["accuracy"] == pytest.approx(np.mean([np.argmax(of) == number for _, number, of in expected]))
        best = [sorted(range(told), key=lambda k, of=of: -of[k])[:5] for _, _, of in expected]
        assert figures.get("top_5") == (
            None if told <= 5 else pytest.approx(np.mean([number in five for five, (_, number, _) in zip(best, expected, strict=True)]))
        )


def test_a_teacher_that_answers_agrees_with_its_own_labels() -> None:
    found, labels = rows(3, 40, 4, 2, 4)
    assert METRICS["accuracy"].of(*labels.pseudo_labels(found).values(found)) == 1.0
    assert METRICS["accuracy"].of(*labels.values(found)) < 0.6


def test_the_ensemble_weighs_directions_and_not_lengths() -> None:
    labels = zero_shot.labels_of(np.array([0, 1, 1, 1]), np.array([1, 0, 1, 1]))
    found = np.array([[1, 0.2], [0.9, 0.6], [100, 0], [0, 1]], np.float32)  # by lengths, class 1 would lie along the first axis
    np.testing.assert_allclose(labels.class_vectors(found)[1][1], [0.5**0.5, 0.5**0.5])
    assert metrics(TASK, found, labels)["accuracy"] == 0.0


def test_intervals_are_those_of_a_share_of_images() -> None:
    found, labels = rows(5, 50, 3, 1, 3)
    told = single(METRICS["accuracy"], found, labels)
    right = round(told.value * 50)
    assert (told.low, told.high, told.n) == (*wilson(right, 50), 50)
    other = found + np.random.default_rng(0).normal(0, 0.5, found.shape).astype(np.float32)
    compared = paired(METRICS["accuracy"], found, other, labels)
    before, after = (labels.values(one)[0].argmax(axis=1) for one in (found, other))
    assert compared.changed == int((before != after).sum()) > 0
    assert compared.n == 50


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 50))
def test_a_choice_of_rows_keeps_the_texts(images: int, texts: int, count: int) -> None:
    labels = zero_shot.labels_of(np.repeat([0, 1], [images, texts]), np.zeros(images + texts))
    chosen = labels.evenly(count)
    sides = labels.array[chosen, 0]
    assert chosen == sorted(set(chosen))
    assert (sides == 1).sum() == min(texts, max(1, count // 2))
    assert (sides == 0).sum() == min(images, max(1, count - int((sides == 1).sum())))


def test_rows_are_read_by_the_model_of_their_kind() -> None:
    assert zero_shot.read_by("image", [b"a", "b", b"c"]) == [0, 2]
    assert zero_shot.read_by("text", [b"a", "b", ("c", "d")]) == [1, 2]
    assert zero_shot.read_by("audio", [b"a", b"b"]) == [0, 1]
