"""Offsets of int4 weights in float: the grid s u - m, u from 0 to 15, with the least error for each group.

    minmax    s = (h - l) / 15, m = -l        l = min(w, 0), h = max(w, 0) over the group
    else      from the range c (h - l) around the same middle, for c in `CLIPS`:
              u = clamp(rint((w + m) / s), 0, 15)
              (s, m) <- argmin over s, m >= 0 of  (s u - m - w) H (s u - m - w)^T        two normal equations

and of all these grids the one with the least error after rounding anew. llama.cpp fits scales and minima of its K-quants in the same way
for the squares of the weights (`make_qkx2_quants` of ggml-quants.c); here errors may be errors of outputs.

Tensor names carry their shapes: I inputs, O outputs, G groups, g inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundation.schemes.int4 import HIGH, LOW
from foundation.schemes.scales import SMALLEST_SCALE, Grid
from quantize.groups.errors import GroupErrors, by_group, chosen

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
STEPS = HIGH - LOW
FARTHEST = 4 * STEPS
"""Largest offset in steps."""


def full_offsets(weights: GroupErrors) -> Grid:
    """Returns the grid that spans each group and 0, float32 [O, G]."""
    return _clipped(weights, 1.0)


def searched_offsets(weights: GroupErrors) -> Grid:
    """Returns the grid with the least error for each group, float32 [O, G]."""
    best = full_offsets(weights)
    error_OG = weights.of_grid(best)
    for clip in CLIPS:
        start = _clipped(weights, clip)
        for grid in (start, _fitted(weights, start)):
            candidate_OG = weights.of_grid(grid)
            better_OG = candidate_OG < error_OG
            best, error_OG = chosen(better_OG, grid, best), torch.where(better_OG, candidate_OG, error_OG)
    return best


def _clipped(weights: GroupErrors, clip: float) -> Grid:
    low_OG, high_OG = weights.weight_GOg.amin(dim=2).T.clamp(max=0), weights.weight_GOg.amax(dim=2).T.clamp(min=0)
    width_OG = high_OG / STEPS - low_OG / STEPS  # the difference of two large floats may be infinite
    offset_OG = (-low_OG - width_OG * (STEPS * (1 - clip) / 2)).clamp(min=0)
    return Grid(_positive(width_OG * clip, width_OG), offset=offset_OG)


def _fitted(weights: GroupErrors, grid: Grid) -> Grid:
    """Returns the grid with the least error for the steps that another grid rounds to."""
    steps_GOg = weights.steps(grid)
    ones_GOg = torch.ones_like(steps_GOg)
    of_steps_GOg, of_ones_GOg = weights.weighted(steps_GOg), weights.weighted(ones_GOg)
    a, b, c = ((of_steps_GOg * steps_GOg).sum(dim=2).T, of_steps_GOg.sum(dim=2).T, of_ones_GOg.sum(dim=2).T)
    p, q = ((left * weights.weight_GOg).sum(dim=2).T for left in (of_steps_GOg, of_ones_GOg))
    scale_OG = (p * c - b * q) / (a * c - b * b)
    offset_OG = (scale_OG * b - q) / c
    without_OG = p / a  # the best scale where the best offset would be negative
    scale_OG, offset_OG = torch.where(offset_OG < 0, without_OG, scale_OG), offset_OG.clamp(min=0)
    # far from 0 a group would need more digits than 16-bit weights of a checkpoint have
    fits_OG = scale_OG.isfinite() & offset_OG.isfinite() & (scale_OG > 0) & (offset_OG <= FARTHEST * scale_OG)
    assert grid.offset is not None, "a grid of this file"
    return Grid(_positive(torch.where(fits_OG, scale_OG, grid.scale), grid.scale), offset=torch.where(fits_OG, offset_OG, grid.offset))


def best_offset(weights: GroupErrors, grid: Grid) -> Tensor:
    """Returns the offsets with the least error for the scales and steps of a grid, float32 [O, G]."""
    assert grid.offset is not None, "a grid of this file"
    left_GOg = weights.steps(grid) * by_group(grid.scale) - weights.weight_GOg
    of_left_GOg, of_ones_GOg = weights.weighted(left_GOg), weights.weighted(torch.ones_like(left_GOg))
    offset_OG = (of_left_GOg.sum(dim=2) / of_ones_GOg.sum(dim=2)).T
    return torch.where(offset_OG.isfinite(), offset_OG, grid.offset)


def _positive(scale_OG: Tensor, otherwise_OG: Tensor) -> Tensor:
    """Returns positive scales: 1 for a group of zeros."""
    return torch.where(otherwise_OG == 0, torch.ones_like(scale_OG), scale_OG.clamp(min=SMALLEST_SCALE))
