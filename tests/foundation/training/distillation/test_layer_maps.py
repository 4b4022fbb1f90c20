from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.core.errors import InputError
from foundation.training.distillation.layer_maps import pairs, searched


@pytest.mark.parametrize(
    ("layers", "student", "teacher", "expected"),
    [
        ("uniform", 4, 12, [3, 6, 9, 12]),  # TinyBERT
        ("uniform", 3, 6, [2, 4, 6]),
        ("uniform", 1, 6, [6]),
        ("skip", 6, 12, [2, 4, 6, 8, 10]),  # PKD-Skip
        ("last", 6, 12, [7, 8, 9, 10, 11]),  # PKD-Last
        ((1, 6), 3, 6, [1, 6]),
    ],
)
def test_the_published_maps(layers: Any, student: int, teacher: int, expected: list[int]) -> None:
    assert pairs(layers, student, teacher, "key") == tuple(enumerate(expected, start=1))


@given(st.integers(1, 40), st.integers(0, 40), st.sampled_from(["uniform", "skip", "last"]))
def test_maps_ascend_within_the_teacher(student: int, more: int, layers: Any) -> None:
    teacher = student + more
    if student == 1 and layers != "uniform":
        with pytest.raises(InputError, match="give uniform"):
            pairs(layers, student, teacher, "key")
        return
    ours, theirs = zip(*pairs(layers, student, teacher, "key"), strict=True)
    assert ours == tuple(range(1, student + (layers == "uniform")))
    assert list(theirs) == sorted(set(theirs))
    assert 1 <= theirs[0] <= theirs[-1] <= teacher - (layers != "uniform")
    if layers == "uniform":
        assert theirs[-1] == teacher
    if more == 0:
        assert ours == theirs


@pytest.mark.parametrize(("layers", "student", "teacher"), [((1, 2, 3), 2, 6), ((7,), 2, 6), ("uniform", 6, 3)])
def test_what_is_no_map(layers: Any, student: int, teacher: int) -> None:
    with pytest.raises(InputError, match=r"stages.distill.loss.layers: .* given"):
        pairs(layers, student, teacher, "stages.distill.loss.layers")


@given(st.integers(1, 5), st.integers(0, 5), st.integers(1, 4), st.integers(0, 999), st.booleans())
def test_the_searched_map_is_the_best_of_all_ascending_ones(student: int, more: int, rows: int, seed: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, student, student + more)
    distances = torch.randint(0, 3, shape, generator=generator).float() if ties else torch.rand(shape, generator=generator)
    found = searched(distances)
    for row in range(rows):
        layers = found[row].tolist()
        assert layers == sorted(set(layers))
        totals = [
            sum(float(distances[row, m, layer]) for m, layer in enumerate(candidate))
            for candidate in itertools.combinations(range(student + more), student)
        ]
        assert sum(float(distances[row, m, layer]) for m, layer in enumerate(layers)) == pytest.approx(min(totals))


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 99), st.sampled_from([torch.nan, torch.inf]), st.integers(0, 3))
def test_a_distance_that_is_no_number_reaches_the_loss(student: int, more: int, seed: int, value: float, layer: int) -> None:
    """The training loop then says what to do."""
    distances = torch.rand(2, student, student + more, generator=torch.Generator().manual_seed(seed))
    distances[0, layer % student] = value
    found = searched(distances)
    assert all(row == sorted(set(row)) and 0 <= row[0] <= row[-1] < student + more for row in found.tolist())
    totals = distances.gather(2, found[:, :, None]).sum(dim=(1, 2))
    assert totals.isfinite().tolist() == [False, True]


@given(st.integers(2, 4), st.integers(0, 3), st.integers(0, 99))
def test_one_layer_that_is_no_number_is_seen(student: int, more: int, seed: int) -> None:
    distances = torch.rand(1, student, student + more, generator=torch.Generator().manual_seed(seed))
    distances[0, 0, 0] = torch.nan
    assert distances.gather(2, searched(distances)[:, :, None]).isnan().any()
