"""Reweighted group lasso: a penalty makes whole groups of weights small during training, and the smallest become 0 afterwards
(Li et al. 2020, https://arxiv.org/abs/2009.08065, section 3; weights of the penalty: Candes et al. 2008).

    loss + sum over layers l of  lambda_l * sum over groups g of  beta_g ||W_g||_2,     beta_g = 1 / (||W_g||_2 + 0.001)

A matrix is cut into blocks of R outputs and C inputs, the last ones smaller. A group is a row of a block (a piece of an output, of C
weights), or a column of a block (a piece of an input, of R weights), or both are groups. beta is constant between reweightings, at equal
distances of steps from the first on: a group that has become small is pushed harder from then on. Afterwards

    layer      the groups of a layer with the smallest root mean squares go, until so many weights are gone
    balanced   inside of each block the same share of its rows, or columns, goes, as nearly as can be, but not all of them

Root mean squares, so that groups at the ragged edges are not smaller for having fewer weights. A row or column that goes in all blocks can
be taken out by surgery; nothing is put back to prevent it. Left out: the penalty on embeddings; a share for each layer, where lambda
differs.

Tensor names carry their shapes: O outputs, I inputs, S x T blocks of R x C.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.training.train import Batch, Objective, steps_in
from prune.sparsify.patterns import Blocks, block_sizes, highest, highest_blocks, num_zeros, spread

Groups = Literal["rows", "columns", "both"]
EPSILON = 1e-3
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def pieces(blocks: Blocks, groups: Groups) -> tuple[Blocks, ...]:
    """Returns the shapes of the groups: a row of a block is a block of one output, a column of one input."""
    both = {"rows": Blocks(1, blocks.columns), "columns": Blocks(blocks.rows, 1)}
    return tuple(shape for name, shape in both.items() if groups in (name, "both"))


def group_norms(weight_OI: Tensor, piece: Blocks) -> Tensor:
    """Returns the norm of each group, float32 `[S, T]` in blocks of the shape of a group; its gradient at 0 is 0."""
    outputs, inputs = weight_OI.shape
    padded = functional.pad(weight_OI, (0, -inputs % piece.columns, 0, -outputs % piece.rows))
    strips, columns = padded.shape[0] // piece.rows, padded.shape[1] // piece.columns
    norms: Tensor = torch.linalg.vector_norm(padded.reshape(strips, piece.rows, columns, piece.columns), dim=(1, 3))
    return norms


class Lasso(nn.Module):
    """The objective of training with the penalty.

    Args:
        objective: The objective of the task.
        layers: The layers under the penalty, by module name.
        strengths: lambda of each.
        shapes: The shapes of groups.
        reweight: Share of the steps between two reweightings.
    """

    def __init__(
        self,
        objective: Objective,
        layers: Mapping[str, nn.Linear],
        strengths: Mapping[str, float],
        shapes: Sequence[Blocks],
        reweight: float,
    ) -> None:
        super().__init__()
        self.objective, self.reweight = objective, reweight
        self.terms = [
            (layer, strengths[name], shape, f"beta_{number}_{which}")  # a list of tuples: the layers are no modules of this one
            for number, (name, layer) in enumerate(layers.items())
            for which, shape in enumerate(shapes)
        ]
        for layer, _, shape, name in self.terms:  # buffers, so that a resumed training goes on with the same ones
            self.register_buffer(name, beta(layer.weight.detach(), shape))

    def forward(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the parts of the loss, float32 `[b]` each; every row has the whole penalty, as the loss is their mean."""
        if batch.step % max(1, steps_in(self.reweight, batch.num_steps)) == 0:
            for layer, _, shape, name in self.terms:
                setattr(self, name, beta(layer.weight.detach(), shape))
        parts = self.objective(model, batch)
        penalty = torch.stack(
            [strength * (getattr(self, name) * group_norms(layer.weight, shape)).sum() for layer, strength, shape, name in self.terms]
        ).sum()
        return {**parts, "lasso": penalty.expand(len(batch.indices))}


def beta(weight_OI: Tensor, piece: Blocks) -> Tensor:
    """Returns how hard each group is pushed, float32 `[S, T]`."""
    return 1 / (group_norms(weight_OI, piece) + EPSILON)


def strengths(names: Sequence[str], usual: float, others: Mapping[str, float]) -> dict[str, float]:
    """Returns lambda of each layer: that of the last pattern of names that matches it, else the usual one."""
    found = dict.fromkeys(names, usual)
    for pattern, value in others.items():
        found |= dict.fromkeys(fnmatch.filter(names, pattern), value)
    return found


def root_mean_squares(weight_OI: Tensor, piece: Blocks) -> Tensor:
    """Returns the root mean square of each group, float64 `[S, T]`."""
    sizes_ST = block_sizes(weight_OI.shape, piece).to(weight_OI.device)
    return group_norms(weight_OI.detach().double(), piece) / sizes_ST.double().sqrt()


def layer_mask(weight_OI: Tensor, shapes: Sequence[Blocks], sparsity: float) -> Tensor:
    """Returns which weights stay when the smallest groups of a layer go, bool `[O, I]`; the first of equals stay.

    Args:
        weight_OI: float32.
        shapes: The shapes of groups; of two, groups of both are in one order, and a weight goes with either of its groups.
        sparsity: Share of the weights to zero, as nearly as can be: with groups of both as nearly as that order comes to it.
    """
    sizes = [root_mean_squares(weight_OI, shape) for shape in shapes]
    if len(shapes) == 1:
        stays_ST = highest_blocks(sizes[0].square(), weight_OI.shape, shapes[0], num_zeros(sparsity, weight_OI.numel()))
        return spread(stays_ST, weight_OI.shape, shapes[0])
    order = torch.cat([values.flatten() for values in sizes]).argsort(descending=True, stable=True).flip(0)

    def kept(gone: int) -> Tensor:
        stays = torch.ones(len(order), dtype=torch.bool, device=order.device)
        stays[order[:gone]] = False
        parts = torch.split(stays, [values.numel() for values in sizes])
        spreads = [
            spread(part.reshape(values.shape), weight_OI.shape, shape) for part, values, shape in zip(parts, sizes, shapes, strict=True)
        ]
        return torch.stack(spreads).all(dim=0)

    def missed(gone: int) -> int:
        return int((~kept(gone)).sum()) - target

    low, high, target = 0, len(order), num_zeros(sparsity, weight_OI.numel())
    while low < high:  # zeros overlap where a row and a column cross, so that their number has to be tried
        middle = (low + high) // 2
        low, high = (low, middle) if missed(middle) >= 0 else (middle + 1, high)
    one_less = low > 0 and (not bool(kept(low).any()) or -missed(low - 1) < missed(low))  # nearer, or all that leaves the layer anything
    return kept(low - 1 if one_less else low)


def num_gone(sparsity: float, number: int) -> int:
    """Returns how many of a block's rows go: as many as come nearest to the share, of two the more, but not all of them."""
    return max(0, min(number - 1, math.floor(sparsity * number + 0.5)))


def balanced_mask(weight_OI: Tensor, blocks: Blocks, groups: Groups, sparsity: float) -> Tensor:
    """Returns which weights stay when each block loses the same share of its rows, or of its columns, bool `[O, I]`.

    Args:
        weight_OI: float32.
        blocks: The blocks.
        groups: rows or columns.
        sparsity: Share of the rows (columns) of each block to zero.
    """
    if groups == "columns":
        return balanced_mask(weight_OI.T, Blocks(blocks.columns, blocks.rows), "rows", sparsity).T
    (piece,) = pieces(blocks, groups)
    strips = torch.split(root_mean_squares(weight_OI, piece), blocks.rows)  # [R, T] each: the rows of all blocks side by side
    stays = [highest(strip_RT.T, len(strip_RT) - num_gone(sparsity, len(strip_RT))).T for strip_RT in strips]
    return spread(torch.cat(stays), weight_OI.shape, piece)


def balanced_share(shape: tuple[int, int] | torch.Size, blocks: Blocks, groups: Groups, sparsity: float) -> float:
    """Returns the share of the weights of a matrix that go, balanced: a matter of its shape alone."""
    length, size = (shape[0], blocks.rows) if groups == "rows" else (shape[1], blocks.columns)
    return sum(num_gone(sparsity, min(size, length - start)) for start in range(0, length, size)) / length


def quantiles(layers: Mapping[str, nn.Linear], shapes: Sequence[Blocks]) -> dict[str, list[float]]:
    """Returns the quantiles `QUANTILES` of the root mean squares of the groups of each layer."""
    found = {}
    for name, layer in layers.items():
        values = torch.cat([root_mean_squares(layer.weight.detach().cpu(), shape).flatten() for shape in shapes]).sort().values
        found[name] = [float(values[round(share * (len(values) - 1))]) for share in QUANTILES]
    return found
