"""Masks against slow loops, on shapes that the patterns do not divide."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prune.patterns import NM, Blocks, Unstructured, block_sizes, block_sums, highest, mask, num_zeros, spread

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 11))


def scores_of(shape: tuple[int, int], seed: int, ties: bool) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (2 * values).round() if ties else values


def ranked(scores: list[float]) -> list[int]:
    """Positions, the highest score first, the first of equals first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


@given(SHAPES, st.integers(0, 999), st.booleans(), st.floats(0, 0.99), st.booleans())
def test_unstructured_is_that_of_the_loop(shape: tuple[int, int], seed: int, ties: bool, sparsity: float, by_output: bool) -> None:
    scores = scores_of(shape, seed, ties)
    found = mask(scores, Unstructured(), sparsity, by_output)
    for row, kept in zip(scores if by_output else [scores.flatten()], found if by_output else [found.flatten()], strict=True):
        staying = ranked(row.tolist())[: len(row) - num_zeros(sparsity, len(row))]
        assert kept.nonzero().flatten().tolist() == sorted(staying)


@given(SHAPES, st.integers(0, 999), st.booleans(), st.integers(1, 4), st.integers(1, 4))
def test_n_of_m_is_that_of_the_loop(shape: tuple[int, int], seed: int, ties: bool, kept: int, more: int) -> None:
    pattern, scores = NM(kept, kept + more), scores_of(shape, seed, ties)
    found = mask(scores, pattern, 0.5)
    for row, line in zip(scores.tolist(), found.tolist(), strict=True):
        for start in range(0, len(row), pattern.group):
            group = row[start : start + pattern.group]
            staying = ranked(group)[: pattern.kept]
            assert [i for i in range(len(group)) if line[start + i]] == sorted(staying)


@given(SHAPES, st.integers(0, 999), st.booleans(), st.integers(1, 5), st.integers(1, 5), st.floats(0, 0.99))
def test_blocks_are_those_of_the_loop(shape: tuple[int, int], seed: int, ties: bool, rows: int, columns: int, sparsity: float) -> None:
    scores = scores_of(shape, seed, ties)
    places = [(top, left) for top in range(0, shape[0], rows) for left in range(0, shape[1], columns)]
    parts = [scores[top : top + rows, left : left + columns].double() for top, left in places]
    means = [float(part.square().sum()) / part.numel() for part in parts]
    expected = torch.ones(shape, dtype=torch.bool)
    for block in reversed(ranked(means)):
        if int((~expected).sum()) >= math.ceil(sparsity * scores.numel() - 1e-9):
            break
        top, left = places[block]
        expected[top : top + rows, left : left + columns] = False
    assert torch.equal(mask(scores, Blocks(rows, columns), sparsity), expected)


@given(SHAPES, st.integers(1, 5), st.integers(1, 5))
def test_sums_over_blocks(shape: tuple[int, int], rows: int, columns: int) -> None:
    values, pattern = torch.arange(shape[0] * shape[1]).reshape(shape), Blocks(rows, columns)
    sums, sizes = block_sums(values, pattern), block_sizes(shape, pattern)
    for s, strip in enumerate(values.split(rows)):
        for t, part in enumerate(strip.split(columns, dim=1)):
            assert (int(sums[s, t]), int(sizes[s, t])) == (int(part.sum()), part.numel())
            assert bool((spread(sums, shape, pattern)[s * rows : (s + 1) * rows, t * columns : (t + 1) * columns] == sums[s, t]).all())


@given(st.floats(0, 0.999), st.integers(1, 10_000))
def test_no_fewer_go_than_asked_and_no_more_than_needed(sparsity: float, number: int) -> None:
    gone = num_zeros(sparsity, number)
    assert gone >= sparsity * number - 1e-6
    assert gone < sparsity * number + 1


@pytest.mark.parametrize(("sparsity", "number", "gone"), [(0.1, 30, 3), (0.7, 10, 7), (0.0, 5, 0), (0.5, 5, 3), (0.999, 3, 3)])
def test_rounding_errors_of_a_share_do_not_count(sparsity: float, number: int, gone: int) -> None:
    assert num_zeros(sparsity, number) == gone


def test_infinite_and_equal_scores() -> None:
    scores = torch.tensor([[-math.inf, 1.0, math.inf, 1.0, 1.0]])
    assert highest(scores, 2).tolist() == [[False, True, True, False, False]]
    assert highest(scores, 0).tolist() == [[False] * 5]
    assert highest(scores, 9).tolist() == [[True] * 5]
    assert [str(pattern) for pattern in (Unstructured(), NM(2, 4), Blocks(4, 8))] == ["unstructured", "2:4", "block 4 x 8"]
