"""Slices: groups of weights across the matrices of a block, whose zeros `prune.compact` turns into smaller matrices.

    attention   one head: its rows of W_q, W_k and W_v, its columns of W_o
    ffn         K neurons that follow one another: their rows of W_up (and W_gate), their columns of W_down

A group is zeroed in all of these matrices at once, so that what one of them no longer writes, the next one no longer reads. Its size in the
metric of the penalty (`prune.sparsify.curvature`) is

    ||V_u||^2 = sum over its matrices of sum of (g_o W_oi a_i)^2 over its rows or columns

Groups of all blocks are compared by ||V_u||^2 / weights: what the loss pays for a multiplication that is saved. The neurons of a block are
sorted by their size first, which changes no output, so that K neurons that go together deserve it alike.

Blocks of which `exclude` names a matrix keep its heads, or its neurons. Not supported: experts; slices of the residual stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from foundation.models.architecture.axes import Axis
from foundation.models.architecture.structure import HEAD_KINDS, Structure, head_pieces
from prune.cost import Component, count_of
from prune.surgery import KeptUnits, shrink


@dataclass(frozen=True)
class Bundle:
    """The groups of the heads, or of the neurons, of one block."""

    name: str
    """Names the block and the component, for figures."""
    block: int
    what: Component
    members: tuple[tuple[str, int, Tensor], ...]
    """For each matrix: the name of its layer, the axis that the units lie on, and the group of each position of that axis, int64."""
    groups: int
    """Number of groups."""

    @property
    def layer(self) -> str:
        """Name of the first layer, whose strength counts for all."""
        return self.members[0][0]

    def norms(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Returns the L2 norm of each group, float32 `[G]`; see `squares`."""
        return self.squares(weights).sqrt().float()

    def squares(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum of the squares in each group, float64 `[G]`.

        Args:
            weights: Weights by layer, `[O, I]`, such as in the metric of the penalty.
        """
        total_G = torch.zeros(self.groups, dtype=torch.float64, device=weights[self.layer].device)
        for name, axis, group_P in self.members:
            per_position_P = weights[name].detach().double().square().sum(dim=1 - axis)
            total_G.index_add_(0, group_P.to(per_position_P.device), per_position_P)
        return total_G

    def sizes(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Returns the number of weights of each group, float64 `[G]`."""
        return self.squares({name: torch.ones_like(weights[name]) for name, *_ in self.members})

    def scale(self, layers: Mapping[str, nn.Linear], factor_G: Tensor) -> None:
        """Multiplies the weights of each group by a factor, in place."""
        for name, axis, group_P in self.members:
            weight_OI = layers[name].weight.data
            factor_P = factor_G.to(weight_OI)[group_P.to(weight_OI.device)]
            weight_OI.mul_(factor_P[:, None] if axis == 0 else factor_P[None, :])


def bundles(model: nn.Module, structure: Structure, layers: Collection[str], lines: int) -> list[Bundle]:
    """Returns the groups of a model, by block and component.

    Args:
        model: The model; its weights are not read.
        structure: Its structure.
        layers: Names of the linear layers that may get zeros.
        lines: Neurons of a group.
    """
    kinds: tuple[Component, ...] = (*(() if structure.tables else HEAD_KINDS), "ffn")
    points = [(block, what) for block in range(structure.depth) for what in kinds]
    found = [_bundle(model, structure, layers, block, what, lines if what == "ffn" else 1) for block, what in points]
    return [bundle for bundle in found if bundle is not None]


def _bundle(model: nn.Module, structure: Structure, layers: Collection[str], block: int, what: Component, lines: int) -> Bundle | None:
    parameters, units = dict(model.named_parameters()), count_of(structure.sizes, block, what)
    pieces: dict[Axis, list[int]] = {}
    """Lengths of the pieces of each axis that hold all units, in order."""
    if what == "ffn":
        pieces = {axis: [structure.sizes.ffn[block]] * structure.repeated.get(axis, 1) for axis in structure.ffn[block]}
    elif (heads := structure.of_heads(block, "cross" if what == "cross" else "heads")) is not None:
        pieces = {axis: head_pieces(heads[0], parts) for axis, parts in heads[1].items()}
    # a learned prefix is no layer: a head whose output nothing reads is silent with it, too
    matrices = {axis: lengths for axis, lengths in sorted(pieces.items()) if parameters[axis[0]].ndim == 2 and axis[0].endswith(".weight")}
    if not matrices or any(name.removesuffix(".weight") not in layers for name, _ in matrices):
        return None
    group_S = torch.arange(units) // lines
    members = tuple(
        (name.removesuffix(".weight"), axis, torch.cat([group_S.repeat_interleave(length // units) for length in lengths]))
        for (name, axis), lengths in matrices.items()
    )
    return Bundle(f"{structure.blocks[block]} {what}", block, what, members, -(-units // lines))


def with_neurons_sorted(model: nn.Module, structure: Structure, weights: Mapping[str, Tensor], key: str) -> nn.Module:
    """Returns the model with the FFN neurons of each block sorted by size, the largest first; its outputs are the same.

    Args:
        model: The model; not changed.
        structure: Its structure.
        weights: Weights by layer in the metric that the size is measured in, `[O, I]`.
        key: Key path of the stage, for messages.
    """
    kept = KeptUnits.everything(structure.sizes)
    ffn = list(kept.ffn)
    for bundle in bundles(model, structure, weights, 1):
        if bundle.what == "ffn":
            ffn[bundle.block] = bundle.squares(weights).argsort(descending=True, stable=True).tolist()
    return shrink(model, structure, replace(kept, ffn=ffn), key)


def slice_masks(weights: Mapping[str, Tensor], found: Sequence[Bundle], sparsity: float, together: bool) -> list[Tensor]:
    """Returns which groups stay when the smallest are zeroed, bool `[G]` for each bundle.

    Args:
        weights: Weights by layer in the metric, `[O, I]`.
        found: The bundles.
        sparsity: Share of their weights to zero; reached from below as nearly as whole groups allow, and never by all groups of a bundle.
        together: Whether all bundles are ranked together; otherwise each reaches the sparsity by itself.
    """
    sizes = [bundle.sizes(weights) for bundle in found]
    scores = [bundle.squares(weights) / size_G for bundle, size_G in zip(found, sizes, strict=True)]
    stays = [torch.ones(bundle.groups, dtype=torch.bool) for bundle in found]
    for members in [range(len(found))] if together else [[number] for number in range(len(found))]:
        left = sparsity * sum(float(sizes[number].sum()) for number in members) + 1e-6
        ranked = sorted((float(score), number, group) for number in members for group, score in enumerate(scores[number]))
        largest = {number: int(scores[number].argmax()) for number in members}
        for _, number, group in ranked:
            size = float(sizes[number][group])
            if group != largest[number] and size <= left:
                stays[number][group] = False
                left -= size
    return stays


def zero_slices(layers: Mapping[str, nn.Linear], found: Sequence[Bundle], stays: Sequence[Tensor]) -> None:
    """Zeroes the groups that do not stay, in place."""
    with torch.no_grad():
        for bundle, stays_G in zip(found, stays, strict=True):
            bundle.scale(layers, stays_G.float())
