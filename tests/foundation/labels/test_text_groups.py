"""Pairs and triplets without scores against written-out loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies

from compress.report.intervals import paired, single
from foundation.data.splits import Split
from foundation.labels import text_groups
from foundation.measure.metrics import METRICS, accuracy, metrics
from tests.tiny_embedding import vectors as drawn

RIGHT = 1
"""Column of the positive of a triplet."""
TRIPLETS = [("a", "p", "n"), ("b", "a", "m"), ("a", "q", "p"), ("c", "r", "n")]


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    dot = sum(float(a) * float(b) for a, b in zip(one, other, strict=True))
    return dot / math.hypot(*one.tolist()) / math.hypot(*other.tolist())


def test_labels_say_whose_which_part_and_which_text() -> None:
    labels = text_groups.labels_of(TRIPLETS)
    assert labels.array.dtype == np.float32
    texts = [text for group in TRIPLETS for text in group]
    assert labels.array[:, :3].tolist() == [[3, number, part] for number in range(4) for part in range(3)]
    for one, name in zip(labels.array[:, 3], texts, strict=True):
        assert [bool(one == other) for other in labels.array[:, 3]] == [name == other for other in texts]


def test_rows_belong_together_only_as_whole_groups() -> None:
    triplets, pairs = (text_groups.labels_of([group[:size] for group in TRIPLETS]) for size in (3, 2))
    for size, labels in ((3, triplets), (2, pairs)):
        split = Split([f"{row}" for row in range(4 * size)], labels)
        assert split.together == size
        assert split.take([*range(size, 2 * size), *range(size)]).together == size
        assert split.take(range(1, size + 1)).together == 1
        assert split.take([0]).together == 1
    assert pairs.count() == 0
    assert len(pairs.parts(2)[0]) == triplets.count() == 4


def test_triplets_are_found_in_any_order_and_what_is_left_of_others_is_left_out() -> None:
    labels, texts = text_groups.labels_of(TRIPLETS), drawn(12)
    order = [11, 4, 3, 0, 9, 10, 5, 1, 8, 6]  # the negative of the first and the positive of the third are missing
    found = labels[order].values(texts[order])[0]
    expected = [[cosine(texts[row], texts[row + other]) for other in (2, 1)] for row in (3, 9)]
    assert found == pytest.approx(np.array(expected), abs=1e-6)
    assert labels[order].count() == 2
    assert len(labels[order].parts(2)[0]) == 3


def test_equally_near_is_wrong_and_answers_swap_the_parts() -> None:
    labels, texts = text_groups.labels_of(TRIPLETS), drawn(12)
    texts[2] = texts[1]
    found = [bool(one == RIGHT) for one in labels.values(texts)[0].argmax(axis=1)]
    assert found == [cosine(texts[row], texts[row + 1]) > cosine(texts[row], texts[row + 2]) and row > 0 for row in (0, 3, 6, 9)]
    assert len(set(found)) == 2
    changed = labels.pseudo_labels(texts)
    assert int(changed.runs().max()) == 3
    for number, was_right in enumerate(found):
        assert changed.array[3 * number : 3 * number + 3, 2].tolist() == ([0, 1, 2] if was_right else [0, 2, 1])
    again = changed.values(texts)[0].argmax(axis=1)
    assert again.tolist() == [0, 1, 1, 1]  # by the answers of a model itself it is right, but for equal ones
    assert metrics("sentence-triplets", texts, labels) == {"accuracy": sum(found) / 4}
    assert accuracy(*labels.values(texts)) == sum(found) / 4
    assert labels.count() == 4
    assert single(METRICS["accuracy"], texts, labels).n == 4
    assert paired(METRICS["accuracy"], texts, texts, labels).n == 4
    assert (changed.array[:, [0, 1, 3]] == labels.array[:, [0, 1, 3]]).all()


def test_a_choice_of_rows_keeps_whole_triplets() -> None:
    labels = text_groups.labels_of([(f"{n}", f"{n}p", f"{n}n") for n in range(20)])
    chosen = labels.sample(16)
    assert len(chosen) == 15
    assert all(row % 3 == 0 and rest == [row + 1, row + 2] for row, *rest in (chosen[at : at + 3] for at in range(0, 15, 3)))


GROUPS = strategies.lists(strategies.lists(strategies.sampled_from("abcdef"), min_size=2, max_size=6).map(tuple), min_size=1, max_size=6)


@given(GROUPS)
def test_groups_of_several_negatives_are_filled_up_and_fillers_say_so(groups: list[tuple[str, ...]]) -> None:
    size = max(len(group) for group in groups)
    filled, labels = text_groups.filled(groups), text_groups.labels_of(groups)
    assert [group[: len(given)] for group, given in zip(filled, groups, strict=True)] == groups
    assert {len(group) for group in filled} == {size}
    assert int(labels.runs().max()) == size == Split([text for group in filled for text in group], labels).together
    assert labels.array[:, 1].tolist() == [number for number in range(len(groups)) for _ in range(size)]
    expected = [part if part < len(group) else -part for group in groups for part in range(size)]
    assert labels.array[:, 2].tolist() == expected
    texts = [text for group in filled for text in group]
    for one, name in zip(labels.array[:, 3], texts, strict=True):
        assert [bool(one == other) for other in labels.array[:, 3]] == [name == other for other in texts]


@given(GROUPS.filter(lambda groups: max(map(len, groups)) > 2), strategies.integers(0, 9))
def test_a_group_is_right_where_the_positive_is_nearer_than_every_negative(groups: list[tuple[str, ...]], seed: int) -> None:
    size, labels = max(len(group) for group in groups), text_groups.labels_of(groups)
    texts = drawn(size * len(groups), seed=seed)
    found, right = labels.values(texts)
    assert right.tolist() == [size - 2] * len(groups)
    for number, group in enumerate(groups):
        rows = texts[size * number : size * (number + 1)]
        own = [cosine(rows[0], rows[part]) for part in range(1, len(group))]
        assert bool(found[number].argmax() == size - 2) == all(own[0] > other for other in own[1:])
    changed = labels.pseudo_labels(texts)
    assert int(changed.runs().max()) == size
    again, right = changed.values(texts)
    assert (again.argmax(axis=1) == right).all()  # by the answers of a model itself it is right
    assert (np.sort(np.abs(changed.array[:, 2]).reshape(-1, size)) == np.arange(size)).all()
    assert (changed.array[labels.array[:, 2] < 0] == labels.array[labels.array[:, 2] < 0]).all()  # a filler answers nothing
    assert labels.count() == len(groups)


def test_a_choice_of_rows_keeps_groups_of_several_negatives_whole() -> None:
    labels = text_groups.labels_of([tuple(f"{n}{part}" for part in range(2 + n % 4)) for n in range(20)])
    chosen = labels.sample(26)
    assert len(chosen) == 25
    assert all(
        row % 5 == 0 and rest == [row + 1, row + 2, row + 3, row + 4] for row, *rest in (chosen[at : at + 5] for at in range(0, 25, 5))
    )
