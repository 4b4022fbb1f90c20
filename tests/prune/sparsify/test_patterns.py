"""Masks against slow loops, on shapes that the patterns do not divide."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prune.sparsify.patterns import (
    NM,
    Blocks,
    Unstructured,
    block_sizes,
    block_sums,
    highest,
    highest_blocks,
    mask,
    num_zeros,
    reachable,
    spread,
)

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
    """Of all numbers of blocks of each shape those nearest to the share, and of those the ones worth least."""
    scores, asked = scores_of(shape, seed, ties), num_zeros(sparsity, shape[0] * shape[1])
    found = mask(scores, Blocks(rows, columns), sparsity)
    kinds: dict[tuple[int, ...], list[tuple[float, bool]]] = {}
    for strip, stays in zip(scores.split(rows), found.split(rows), strict=True):
        for part, kept in zip(strip.split(columns, dim=1), stays.split(columns, dim=1), strict=True):
            assert bool(kept.all()) or not bool(kept.any())
            kinds.setdefault(tuple(part.shape), []).append((float(part.double().square().mean()), bool(kept.any())))
    choices = []
    for numbers in itertools.product(*(range(len(blocks) + 1) for blocks in kinds.values())):
        gone = sum(number * math.prod(kind) for number, kind in zip(numbers, kinds, strict=True))
        lowest = [sorted(value for value, _ in blocks)[:number] for number, blocks in zip(numbers, kinds.values(), strict=True)]
        worth = sum(math.prod(kind) * sum(values) for kind, values in zip(kinds, lowest, strict=True))
        if gone < scores.numel():
            choices.append((abs(gone - asked), -gone, worth, numbers))
    _, gone, worth, _ = min(choices)
    assert int((~found).sum()) == -gone
    assert float(scores[~found].double().square().sum()) == pytest.approx(worth, rel=1e-9, abs=1e-12)
    for blocks in kinds.values():
        staying = ranked([value for value, _ in blocks])[: sum(kept for _, kept in blocks)]
        assert [i for i, (_, kept) in enumerate(blocks) if kept] == sorted(staying)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 15), st.integers(1, 15), st.integers(0, 99), st.floats(0, 0.999))
def test_blocks_come_as_near_as_they_can_and_leave_something(
    outputs: int, inputs: int, rows: int, columns: int, seed: int, sparsity: float
) -> None:
    pattern, shape = Blocks(rows, columns), (outputs, inputs)
    kept, sizes = mask(scores_of(shape, seed, False), pattern, sparsity), block_sizes(shape, pattern).flatten().tolist()
    sums = {0}
    for size in sizes:
        sums |= {size + before for before in sums}
    gone, asked = int((~kept).sum()), num_zeros(sparsity, outputs * inputs)
    assert abs(gone - asked) == min(abs(one - asked) for one in sums - {outputs * inputs})
    assert gone < outputs * inputs
    assert gone == reachable(shape, pattern, sparsity)


@pytest.mark.parametrize(("shape", "sparsity", "reached"), [((384, 384), 0.5, 5 / 9), ((384, 384), 0.9, 8 / 9), ((384, 1536), 0.5, 0.5)])
def test_blocks_that_are_cut_do_not_overshoot(shape: tuple[int, int], sparsity: float, reached: float) -> None:
    for seed in range(8):
        found = mask(scores_of(shape, seed, False), Blocks(256, 256), sparsity)
        assert float((~found).double().mean()) == pytest.approx(reached)


def test_all_blocks_may_go_where_that_is_said() -> None:
    one, shape, pattern = torch.ones(1, 1), (3, 4), Blocks(8, 8)
    assert highest_blocks(one, shape, pattern, 11).tolist() == [[True]]
    assert highest_blocks(one, shape, pattern, 11, may_empty=True).tolist() == [[False]]


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
    assert gone >= min(sparsity * number - 1e-6, number - 1)
    assert gone < sparsity * number + 1
    assert gone < number


@pytest.mark.parametrize(("sparsity", "number", "gone"), [(0.1, 30, 3), (0.7, 10, 7), (0.0, 5, 0), (0.5, 5, 3), (0.999, 3, 2), (1.0, 3, 3)])
def test_rounding_errors_of_a_share_do_not_count(sparsity: float, number: int, gone: int) -> None:
    assert num_zeros(sparsity, number) == gone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ties", [False, True])
def test_the_limit_is_that_of_sorting(ties: bool, dtype: torch.dtype) -> None:
    scores = scores_of((3, 500), 0, ties).to(dtype)
    for count in (1, 77, 250, 499):
        expected = torch.zeros_like(scores, dtype=torch.bool).scatter(
            1, scores.argsort(dim=1, descending=True, stable=True)[:, :count], True
        )
        assert torch.equal(highest(scores, count), expected)


def test_infinite_and_equal_scores() -> None:
    scores = torch.tensor([[-math.inf, 1.0, math.inf, 1.0, 1.0]])
    assert highest(scores, 2).tolist() == [[False, True, True, False, False]]
    assert highest(scores, 0).tolist() == [[False] * 5]
    assert highest(scores, 9).tolist() == [[True] * 5]
    assert [str(pattern) for pattern in (Unstructured(), NM(2, 4), Blocks(4, 8))] == ["unstructured", "2:4", "block 4 x 8"]
