"""Two-level scales of int4 weights: the numbers of `foundation.schemes.two_level` with the least error for a float grid.

Given float scales s, and zero points z or offsets m, for each super-block

    d = shared(max s / t)  for t in `TOPS`        a = clamp(rint(s / d) + i, 1, 63)
    e = shared(max m / 63)                        b = clamp(rint(m / e) + k, 0, 63)

Of all a (i in `CHANGES`) and z or b next to them, a group takes those with the least error; of all d a super-block takes the one with
the least sum of errors. Rounding s and m alone (t = 63, i = k = 0), as llama.cpp does, is among them, so that no super-block is worse. For
each a, the offset next to which b is searched is the best for the codes that m gives.

Where groups take their whole range (minmax), a and b are rounded up, so that still nothing is clipped.

Tensor names carry their shapes: I inputs, O outputs, G groups, S super-blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from foundation.core.errors import InputError
from foundation.schemes.int4 import HIGH, LOW
from foundation.schemes.scales import Grid
from foundation.schemes.two_level import LARGEST, LARGEST_SHARED, in_super_blocks, of_groups, shared
from quantize.groups.errors import GroupErrors, chosen
from quantize.groups.offsets import best_offset

TOPS = (63, 56)
"""Integers that the largest scale of a super-block gets."""
CHANGES = (0, -1, 1, -2, 2)
NEIGHBOURS = (0, -1, 1)
EXACT = 1e-5
"""A quotient above an integer by less than this is the integer, up to the rounding of float32."""


def two_level(weights: GroupErrors, grid: Grid) -> Grid:
    """Returns the two-level grid with the least error next to a float grid.

    Args:
        weights: Weights, and how their errors count.
        grid: Float scales [O, G], with zero points or offsets, or neither.

    Raises:
        InputError: A scale or offset is too large for float16.
    """
    largest_OS, super_offset = _largest(_of_nonzero(weights, grid.scale)), _super_offset(grid)
    best: Grid | None = None
    least_OS = torch.zeros(0)
    for top in TOPS:
        super_OS = shared(largest_OS / top)
        found, error_OG = _searched(weights, grid._replace(super_scale=super_OS, super_offset=super_offset))
        error_OS = in_super_blocks(error_OG).sum(dim=2)
        if best is None:
            best, least_OS = found, error_OS
            continue
        better_OS = error_OS < least_OS
        merged = chosen(of_groups(better_OS, error_OG.shape[1]), found, best)
        assert best.super_scale is not None, "two-level"
        best = merged._replace(super_scale=torch.where(better_OS, super_OS, best.super_scale))
        least_OS = torch.where(better_OS, error_OS, least_OS)
    assert best is not None, "there is at least one of TOPS"
    return best


def two_level_range(weights: GroupErrors, grid: Grid) -> Grid:
    """Returns the two-level grid next to a float grid that spans what it spans: nothing more is clipped; the arguments are as above."""
    scale_OG, zero_point, offset_OG, super_offset = _of_nonzero(weights, grid.scale), grid.zero_point, grid.offset, None
    if offset_OG is not None:
        super_offset = shared(_largest(offset_OG) / LARGEST, up=True)
        raised_OG = _raised(offset_OG, super_offset, smallest=0)
        scale_OG = scale_OG + (raised_OG - offset_OG) / (HIGH - LOW)
        offset_OG = raised_OG
    super_OS = shared(_largest(scale_OG) / LARGEST, up=True)
    raised_OG = _raised(scale_OG, super_OS, smallest=1)
    if zero_point is not None:
        low_OG = weights.weight_GOg.amin(dim=2).T.clamp(max=0)
        zero_point = (LOW - low_OG / raised_OG).round().to(torch.int8)
    return Grid(raised_OG, zero_point, offset_OG, super_OS, super_offset)


def _raised(value_OG: Tensor, super_OS: Tensor, smallest: int) -> Tensor:
    shared_OG = of_groups(super_OS, value_OG.shape[1])
    return (value_OG / shared_OG - EXACT).ceil().clamp(smallest, LARGEST) * shared_OG


def _of_nonzero(weights: GroupErrors, scale_OG: Tensor) -> Tensor:
    """Returns scales with 0 for groups of zeros, whose scale of 1 says nothing."""
    return torch.where((weights.weight_GOg == 0).all(dim=2).T, torch.zeros_like(scale_OG), scale_OG)


def _largest(value_OG: Tensor) -> Tensor:
    """Returns the largest number of each super-block, float32 [O, S].

    Raises:
        InputError: It is too large.
    """
    largest_OS = in_super_blocks(value_OG).amax(dim=2)
    if bool((largest_OS > LARGEST * LARGEST_SHARED).any()):
        given = f"a scale or offset of {float(largest_OS.max()):.3g} in a group of weights"
        allowed = f"two-level numbers are float16 numbers up to {LARGEST * LARGEST_SHARED:.0f}"
        raise InputError("quantize.group_scales", given, allowed, "give group_scales: float, or exclude the layer")
    return largest_OS


def _super_offset(grid: Grid) -> Tensor | None:
    return None if grid.offset is None else shared(_largest(grid.offset) / LARGEST)


def _searched(weights: GroupErrors, start: Grid) -> tuple[Grid, Tensor]:
    """Returns the grid with the least error of each group for given numbers of its super-block, and the errors, float32 [O, G]."""
    best, *others = _candidates(weights, start)
    error_OG = weights.of_grid(best)
    for grid in others:
        candidate_OG = weights.of_grid(grid)
        better_OG = candidate_OG < error_OG
        best, error_OG = chosen(better_OG, grid, best), torch.where(better_OG, candidate_OG, error_OG)
    return best, error_OG


def _candidates(weights: GroupErrors, start: Grid) -> Iterator[Grid]:
    """Yields the grids to try, the plainly rounded one first."""
    assert start.super_scale is not None, "the numbers of super-blocks are chosen before"
    shared_OG = of_groups(start.super_scale, start.scale.shape[1])
    level_OG = (_of_nonzero(weights, start.scale) / shared_OG).round()
    for change in CHANGES:
        grid = start._replace(scale=(level_OG + change).clamp(1, LARGEST) * shared_OG)
        if start.offset is not None:
            yield from _offsets(weights, grid)
        elif start.zero_point is not None:
            for shift in NEIGHBOURS:
                yield grid._replace(zero_point=(start.zero_point + shift).clamp(LOW, HIGH))
        else:
            yield grid


def _offsets(weights: GroupErrors, grid: Grid) -> Iterator[Grid]:
    """Yields a grid with its own offsets rounded, and with those next to the best ones."""
    assert grid.offset is not None, "a grid with offsets"
    assert grid.super_offset is not None, "a grid with offsets"
    shared_OG = of_groups(grid.super_offset, grid.scale.shape[1])
    rounded = grid._replace(offset=(grid.offset / shared_OG).round().clamp(0, LARGEST) * shared_OG)
    yield rounded
    level_OG = (best_offset(weights, rounded) / shared_OG).round()
    for shift in NEIGHBOURS:
        yield grid._replace(offset=(level_OG + shift).clamp(0, LARGEST) * shared_OG)
