"""Emptied units: rows, columns, neurons and heads that zeros have disconnected; removing them would not change the outputs.

    outputs   all-zero rows of W: only their bias is left
    inputs    all-zero columns of W: their values are never read
    neurons   all-zero columns of the layer that reads the FFN neurons
    heads     head groups whose columns of the attention output projection are all zero

The stage `compact` removes neurons and heads that are never read. Not supported: units whose inputs are all zero; experts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from foundation.models.architecture.structure import HEAD_KINDS, Structure
from prune.cost import count_of
from prune.hook_points import HookPoints


def emptied(weight_OI: Tensor) -> dict[str, int]:
    """Returns the numbers of all-zero rows (`outputs`) and columns (`inputs`) of a weight."""
    nonzero_OI = weight_OI.detach() != 0
    return {"outputs": int((~nonzero_OI.any(dim=1)).sum()), "inputs": int((~nonzero_OI.any(dim=0)).sum())}


def unread(model: nn.Module, structure: Structure) -> Mapping[str, int]:
    """Returns how many head groups (`heads`) and `neurons` are never read, over all blocks."""
    hooks, counts = HookPoints.of(model, structure), {"heads": 0, "neurons": 0}
    for block in range(structure.depth):
        for what in HEAD_KINDS:
            reader = hooks.at(block, what)
            if reader is not None:
                read_OI = model.get_submodule(reader).weight.detach() != 0  # type: ignore[operator]
                read_S = read_OI.any(dim=0).reshape(count_of(structure.sizes, block, what), -1).any(dim=1)
                counts["heads"] += int((~read_S).sum())
        neurons = hooks.ffn[block]
        if neurons is not None:
            counts["neurons"] += emptied(model.get_submodule(neurons).weight)["inputs"]  # type: ignore[arg-type]
    return counts
