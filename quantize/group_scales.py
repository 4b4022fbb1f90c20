"""Scales of int4 weights, and their zero points: one per output and group of inputs, clipped if that lowers the error.

    minmax     the whole range of a group                                                  `full_grid`
    weights    the range with the least squared error of the weights                       `searched_grid`
    outputs    the range with the least squared error of the outputs on calibration rows   `searched_grid`, with moments of the groups

    s = argmin over c in (0.5 ... 1.0) of  d H_gg d^T,    d = W_g - Q(W_g; c * max |W_g| / 7)

where H_gg is the block of H = mean of x x^T for the inputs of the group; without H it is the identity, which gives the squared error of the
weights. One of the c is 7/8: with it the largest weight, if negative, gets exactly the code -8.

Asymmetric quantization also tries c * (max - min) / 15 with the zero point of the whole range, which a smaller c leaves where it is. The
symmetric grids stay among the candidates, with a zero point of 0, so that no group gets worse than without zero points.

The search ignores that H couples the groups of an output, so it may make an output worse: `Groups.best` compares the error of whole outputs
and keeps the better grid for each.

Scales may be two-level numbers, chosen next to these float scales (`quantize.groups.levels`), with offsets in place of zero points for
K-quants (`quantize.groups.offsets`). Errors are then errors of the two-level numbers.

Tensor names carry their shapes: I inputs, O outputs, G groups, g inputs of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foundation.schemes.int4 import GroupScales, Int4Scales, group_range, group_scale, grouped, num_groups
from foundation.schemes.scales import SMALLEST_SCALE, Grid
from quantize.choices import GroupRange
from quantize.groups.errors import GroupErrors, chosen
from quantize.groups.levels import two_level, two_level_range
from quantize.groups.offsets import full_offsets, searched_offsets
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
    scales: GroupScales = "float"

    def grid(self, weight_OI: Tensor, blocks_Ggg: Tensor | None = None) -> Grid:
        """Returns the grid of each group, float32 [O, G], with zero points int8 [O, G] or offsets float32 [O, G] unless symmetric.

        Args:
            weight_OI: float32.
            blocks_Ggg: Mean of x x^T over the inputs of each group, float32; needed if `range_by` is outputs, and then alone.
        """
        match self.range_by:
            case "minmax":
                return self.full(weight_OI)
            case "weights":
                return self.searched(weight_OI, None)
            case "outputs":
                assert blocks_Ggg is not None, "chosen by the outputs, without the moments of the inputs"
                return self.searched(weight_OI, blocks_Ggg)

    def full(self, weight_OI: Tensor) -> Grid:
        """Returns the grid of each group that clips nothing; see `grid`."""
        if self.scales == "float":
            return full_grid(weight_OI, self.size, symmetric=self.symmetric)
        weights = GroupErrors.of(weight_OI, self.size, None)
        start = full_offsets(weights) if self.scales == "k_quant" else full_grid(weight_OI, self.size, symmetric=self.symmetric)
        return two_level_range(weights, start)

    def searched(self, weight_OI: Tensor, blocks_Ggg: Tensor | None) -> Grid:
        """Returns the grid of each group with the least error, of the outputs if the blocks of H are given; see `grid`."""
        if self.scales == "float":
            return searched_grid(weight_OI, self.size, blocks_Ggg, symmetric=self.symmetric)
        weights = GroupErrors.of(weight_OI, self.size, blocks_Ggg)
        if self.scales == "k_quant":
            return two_level(weights, searched_offsets(weights))
        return two_level(weights, searched_grid(weight_OI, self.size, blocks_Ggg, symmetric=self.symmetric))

    def best(self, weight_OI: Tensor, hessian_II: Tensor) -> Grid:
        """Returns for each output the grid searched with or without H, whichever has the smaller output error; see `grid`."""
        grids = [self.searched(weight_OI, blocks) for blocks in (diagonal_blocks(hessian_II, self.size), None)]
        error_O, plain_O = (output_errors(weight_OI, Int4Scales.of_grid(grid, self.size).on_grid(weight_OI), hessian_II) for grid in grids)
        return chosen((error_O < plain_O)[:, None], *grids)

    def divided(self, weight_OI: Tensor, grid: Grid, factor_O: Tensor) -> Grid:
        """Returns the grid of a weight whose outputs were divided by a factor, float32 [O]: divided too, and two-level again.

        Args:
            weight_OI: float32, divided already.
            grid: Its grid before.
            factor_O: The factor.
        """
        offset = None if grid.offset is None else grid.offset / factor_O[:, None]
        found = Grid(grid.scale / factor_O[:, None], grid.zero_point, offset)
        return found if self.scales == "float" else two_level(GroupErrors.of(weight_OI, self.size, None), found)


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


def searched_grid(weight_OI: Tensor, group_size: int, blocks_Ggg: Tensor | None, *, symmetric: bool) -> Grid:
    """Returns the grid with the least error for each group, float32 [O, G], with zero points int8 [O, G] unless symmetric.

    Args:
        weight_OI: float32.
        group_size: Inputs that share a scale; the last group may be shorter.
        blocks_Ggg: Diagonal blocks of H (`diagonal_blocks`), float32 [G, g, g]; None for the squared error of the weights.
        symmetric: Whether all zero points are 0.
    """
    weights = GroupErrors.of(weight_OI, group_size, blocks_Ggg)
    best, *others = _candidates(weight_OI, group_size, symmetric)
    error_OG = weights.of_grid(best)
    for grid in others:
        candidate_OG = weights.of_grid(grid)
        better_OG = candidate_OG < error_OG
        best, error_OG = chosen(better_OG, grid, best), torch.where(better_OG, candidate_OG, error_OG)
    return best


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
