"""Scales of int4 weights, and their zero points: one per output and group of inputs, clipped if that lowers the error.

    minmax     the whole range of a group                                                  `full_grid`
    weights    the range with the least squared error of the weights                       `clipped_grid`
    outputs    the range with the least squared error of the outputs on calibration rows   `searched_grid`, with moments of the groups

    s = argmin over c in (0.5 ... 1.0) of  d H_gg d^T,    d = W_g - Q(W_g; c * max |W_g| / 7)

where H_gg is the block of H = mean of x x^T for the inputs of the group; without H it is the identity, which gives the squared error of the
weights. One of the c is 7/8: with it the largest weight, if negative, gets exactly the code -8.

Asymmetric quantization also tries c * (max - min) / 15 with the zero point of the whole range, which a smaller c leaves where it is. The
symmetric grids stay among the candidates, with a zero point of 0, so that no group gets worse than without zero points.

The search ignores that H couples the groups of an output, so it may make an output worse: `best_grid` compares the error of whole outputs
and keeps the better grid for each.

Tensor names carry their shapes: I inputs, O outputs, G groups, g inputs of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foundation.schemes.int4 import HIGH, LOW, Int4Scales, group_range, group_scale, grouped, nearest, num_groups
from foundation.schemes.scales import SMALLEST_SCALE, Grid
from quantize.choices import GroupRange
from quantize.moments import output_errors

CLIPS = tuple(step / 40 for step in range(20, 40))


@dataclass(frozen=True)
class Groups:
    """How the groups of int4 weights get their grids."""

    size: int
    """Inputs that share a scale; the last group may be shorter."""
    symmetric: bool = True
    """Whether weights have no zero points."""
    range_by: GroupRange = "weights"

    def grid(self, weight_OI: Tensor, blocks_Ggg: Tensor | None = None) -> Grid:
        """Returns the grid of each group, float32 [O, G], with zero points int8 [O, G] unless symmetric.

        Args:
            weight_OI: float32.
            blocks_Ggg: Mean of x x^T over the inputs of each group, float32; needed if `range_by` is outputs, and then alone.
        """
        match self.range_by:
            case "minmax":
                return full_grid(weight_OI, self.size, symmetric=self.symmetric)
            case "weights":
                return clipped_grid(weight_OI, self.size, symmetric=self.symmetric)
            case "outputs":
                assert blocks_Ggg is not None, "chosen by the outputs, without the moments of the inputs"
                return searched_grid(weight_OI, self.size, blocks_Ggg, symmetric=self.symmetric)


class GroupMoments:
    """Sums of x x^T over all rows so far, for the inputs of each group alone: a share g / I of the memory of `quantize.moments`."""

    def __init__(self, group_size: int) -> None:
        self._group_size, self._product_Ggg, self.total = group_size, torch.zeros(0), 0

    def add(self, x_NI: Tensor) -> None:
        """Adds rows, float [N, I]; raises ValueError if a value is NaN or infinite."""
        if not len(x_NI):
            return
        groups_GNg = grouped(x_NI.detach().float(), self._group_size).transpose(0, 1)
        if not bool(groups_GNg.isfinite().all()):
            raise ValueError("NaN or infinite value")
        product_Ggg = groups_GNg.transpose(1, 2) @ groups_GNg
        self._product_Ggg = self._product_Ggg + product_Ggg if self.total else product_Ggg
        self.total += len(x_NI)

    @property
    def blocks_Ggg(self) -> Tensor:
        """Mean of x x^T for each group, float32 [G, g, g]; 0 past the inputs of a shorter last group."""
        return self._product_Ggg / max(1, self.total)


def full_grid(weight_OI: Tensor, group_size: int, *, symmetric: bool) -> Grid:
    """Returns the grid of each group that clips nothing, float32 [O, G], with zero points int8 [O, G] unless symmetric."""
    return Grid(group_scale(weight_OI, group_size)) if symmetric else group_range(weight_OI, group_size)


def clipped_grid(weight_OI: Tensor, group_size: int, hessian_II: Tensor | None = None, *, symmetric: bool) -> Grid:
    """Returns the grid with the least error for each group, float32 [O, G], with zero points int8 [O, G] unless symmetric.

    Args:
        weight_OI: float32.
        group_size: Inputs that share a scale; the last group may be shorter.
        hessian_II: Mean of x x^T over the inputs, float32; None for the squared error of the weights.
        symmetric: Whether all zero points are 0.
    """
    return searched_grid(
        weight_OI, group_size, None if hessian_II is None else diagonal_blocks(hessian_II, group_size), symmetric=symmetric
    )


def searched_grid(weight_OI: Tensor, group_size: int, blocks_Ggg: Tensor | None, *, symmetric: bool) -> Grid:
    """Returns what `clipped_grid` does, from the diagonal blocks of H alone, float32 [G, g, g]."""
    groups_GOg = grouped(weight_OI, group_size).transpose(0, 1)
    best, *others = _candidates(weight_OI, group_size, symmetric)
    error_OG = _errors(groups_GOg, best, blocks_Ggg)
    for grid in others:
        candidate_OG = _errors(groups_GOg, grid, blocks_Ggg)
        better_OG = candidate_OG < error_OG
        best, error_OG = _chosen(better_OG, grid, best), torch.where(better_OG, candidate_OG, error_OG)
    return best


def best_grid(weight_OI: Tensor, group_size: int, hessian_II: Tensor, *, symmetric: bool) -> Grid:
    """Returns for each output the grid found with or without H, whichever has the smaller output error; see `clipped_grid`."""
    grids = [clipped_grid(weight_OI, group_size, given, symmetric=symmetric) for given in (hessian_II, None)]
    error_O, plain_O = (
        output_errors(weight_OI, Int4Scales(scale_OG, group_size, zero_OG).on_grid(weight_OI), hessian_II) for scale_OG, zero_OG in grids
    )
    return _chosen((error_O < plain_O)[:, None], *grids)


def diagonal_blocks(hessian_II: Tensor, group_size: int) -> Tensor:
    """Returns the diagonal block of H for each group, float32 [G, g, g]; padded with zeros."""
    groups = num_groups(len(hessian_II), group_size)
    missing = groups * group_size - len(hessian_II)
    padded_II = nn.functional.pad(hessian_II, (0, missing, 0, missing))
    return padded_II.reshape(groups, group_size, groups, group_size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _candidates(weight_OI: Tensor, group_size: int, symmetric: bool) -> Iterator[Grid]:
    """Yields the grids to try: of the whole range, then of each clip of it."""
    full = Grid(group_scale(weight_OI, group_size))
    starts = [full] if symmetric else [Grid(full.scale, torch.zeros_like(full.scale, dtype=torch.int8)), group_range(weight_OI, group_size)]
    for start in starts:
        yield start
        for clip in CLIPS:
            yield Grid((start.scale * clip).clamp(min=SMALLEST_SCALE), start.zero_point)


def _chosen(mask: Tensor, grid: Grid, other: Grid) -> Grid:
    """Returns one grid where the mask holds, the other elsewhere; both have zero points, or none has."""
    zero_OG = None
    if grid.zero_point is not None and other.zero_point is not None:
        zero_OG = torch.where(mask, grid.zero_point, other.zero_point)
    return Grid(torch.where(mask, grid.scale, other.scale), zero_OG)


def _errors(groups_GOg: Tensor, grid: Grid, blocks_Ggg: Tensor | None) -> Tensor:
    """Returns the error of each group, float32 [O, G]."""
    scale_GO1 = grid.scale.T[:, :, None]
    zero_GO1 = 0 if grid.zero_point is None else grid.zero_point.T[:, :, None]
    difference_GOg = nearest(groups_GOg, scale_GO1, LOW - zero_GO1, HIGH - zero_GO1).float() * scale_GO1 - groups_GOg
    weighted_GOg = difference_GOg if blocks_Ggg is None else difference_GOg @ blocks_Ggg
    return (weighted_GOg * difference_GOg).sum(dim=2).T
