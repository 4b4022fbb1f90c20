"""Errors of the grids of groups: of their weights, or of the outputs that they contribute to.

    error = d H_gg d^T,    d = W_g - Q(W_g)

H_gg is the block of H = mean of x x^T for the inputs of the group; without H it is the identity, which gives the squared error of the
weights. Inputs past the end of a shorter last group do not count.

Tensor names carry their shapes: I inputs, O outputs, G groups, g inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foundation.schemes.int4 import HIGH, LOW, grouped, nearest
from foundation.schemes.scales import Grid


@dataclass(frozen=True)
class GroupErrors:
    """The groups of a weight, and how their errors are weighted."""

    weight_GOg: Tensor
    """float32; 0 past the inputs of a shorter last group."""
    weights_GIg: Tensor
    """What errors are weighted by, float32: the blocks of H `[G, g, g]`, or `[G, 1, g]` with 1 for an input and 0 past the last."""

    @classmethod
    def of(cls, weight_OI: Tensor, group_size: int, blocks_Ggg: Tensor | None) -> GroupErrors:
        """Returns the errors of the groups of a weight, float32; by its outputs if the blocks of H are given."""
        weights_GIg = grouped(torch.ones_like(weight_OI[:1]), group_size).transpose(0, 1) if blocks_Ggg is None else blocks_Ggg
        return cls(grouped(weight_OI, group_size).transpose(0, 1), weights_GIg)

    def weighted(self, values_GOg: Tensor) -> Tensor:
        """Returns values times H, float32 [G, O, g]."""
        return values_GOg * self.weights_GIg if self.weights_GIg.shape[1] == 1 else values_GOg @ self.weights_GIg

    def inner(self, values_GOg: Tensor, others_GOg: Tensor) -> Tensor:
        """Returns v H u^T of each group, float32 [O, G]."""
        return (self.weighted(values_GOg) * others_GOg).sum(dim=2).T

    def steps(self, grid: Grid) -> Tensor:
        """Returns the steps to which the weights are rounded, float32 [G, O, g]: codes less zero points, or codes plus 8 with offsets."""
        scale_GO1 = by_group(grid.scale)
        if grid.offset is not None:
            return nearest(self.weight_GOg + by_group(grid.offset), scale_GO1, 0, HIGH - LOW).float()
        zero_GO1 = 0 if grid.zero_point is None else by_group(grid.zero_point)
        return nearest(self.weight_GOg, scale_GO1, LOW - zero_GO1, HIGH - zero_GO1).float()

    def of_grid(self, grid: Grid) -> Tensor:
        """Returns the error of each group, float32 [O, G]."""
        rounded_GOg = self.steps(grid) * by_group(grid.scale)
        difference_GOg = (rounded_GOg if grid.offset is None else rounded_GOg - by_group(grid.offset)) - self.weight_GOg
        return self.inner(difference_GOg, difference_GOg)


def by_group(value_OG: Tensor) -> Tensor:
    """Returns numbers of groups as [G, O, 1]."""
    return value_OG.T[:, :, None]


def chosen(mask: Tensor, grid: Grid, other: Grid) -> Grid:
    """Returns one grid where the mask holds, the other elsewhere; both have the same parts.

    Args:
        mask: bool [O, G], or [O, 1].
        grid: The grid where it holds; the numbers of super-blocks must agree with the other's, unless the mask is [O, 1].
        other: The grid elsewhere.
    """

    def of(tensor: Tensor | None, another: Tensor | None) -> Tensor | None:
        if tensor is None or another is None:
            return None
        return torch.where(mask, tensor, another)

    if mask.shape[1] != 1:
        scale, zero_point, offset = (of(*pair) for pair in zip(grid[:3], other[:3], strict=True))
        assert scale is not None, "every grid has scales"
        return Grid(scale, zero_point, offset, other.super_scale, other.super_offset)
    return Grid(*(of(*pair) for pair in zip(grid, other, strict=True)))  # type: ignore[arg-type]
