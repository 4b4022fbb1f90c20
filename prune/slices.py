"""Slices: the weights that belong to each unit of a model, as rows of matrices.

A head group owns rows of W_q, W_k, W_v (and their biases) and columns of W_o; a neuron a row of W_up (and W_gate) and a column of W_down;
an expert its slice of the stacked weights; a channel one index of every axis over the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foundation.models.architecture.axes import Axis
from foundation.models.architecture.structure import Structure, head_pieces
from foundation.models.layers.expert_names import by_expert
from prune.cost import Component, count_of


def component_slices(structure: Structure, weights: Mapping[str, Tensor], block: int, what: Component) -> list[Tensor]:
    """Returns the slices of the head groups, FFN neurons or experts of one block, `[S, n]` each.

    Args:
        structure: Structure of the model.
        weights: Its weights, or tensors of the same shapes, by name.
        block: Index of the block.
        what: The component.
    """
    number = count_of(structure.sizes, block, what)
    if what == "experts":
        own = by_expert(name for name in weights if name.startswith(f"{structure.blocks[block]}."))
        listed = [torch.stack([weights[name].reshape(-1) for name in of_kind]) for of_kind in own]
        return [*(_rows(weights[axis[0]], axis, number) for axis in sorted(structure.experts[block])), *listed]
    if what == "ffn":
        pieces = [(axis, structure.repeated.get(axis, 1)) for axis in sorted(structure.ffn[block])]
    else:
        found = structure.of_heads(block, what)
        assert found is not None, f"block {block} has no {what}"
        attention, axes = found
        return [
            _rows(piece, axis, number)
            for axis, parts in sorted(axes.items())
            for piece in torch.split(weights[axis[0]], head_pieces(attention, parts), dim=axis[1])
        ]
    return [
        _rows(piece, axis, number)
        for axis, times in pieces
        for piece in torch.split(weights[axis[0]], weights[axis[0]].shape[axis[1]] // times, dim=axis[1])
    ]


def channel_slices(structure: Structure, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns the slices of the channels of the residual stream, `[D, n]` each."""
    return [_rows(weights[axis[0]], axis, structure.sizes.hidden) for axis in sorted(structure.residual)]


def _rows(weight: Tensor, axis: Axis, number: int) -> Tensor:
    return weight.movedim(axis[1], 0).reshape(number, -1)
