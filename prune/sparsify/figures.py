"""Figures of a sparse model for the manifest: zeros by layer, and the heads and neurons that are no longer read."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture.structure import Structure
from prune.emptied import emptied, unread
from prune.sparsify.patterns import Blocks, Pattern, block_sizes, block_sums


def layer_figures(name: str, weight_OI: Tensor, pattern: Pattern) -> dict[str, Any]:
    """Returns the figures of one layer, JSON types.

    Args:
        name: Module name of the layer.
        weight_OI: Its weights, float `[O, I]`.
        pattern: The sparsity pattern of the stage.

    Returns:
        `name`, `weights`, `zeros`, `sparsity`, `outputs` and `inputs` (rows and columns without a nonzero weight); for block patterns also
        `blocks` and `zero_blocks`.
    """
    zeros = int((weight_OI == 0).sum())
    row: dict[str, object] = {"name": name, "weights": weight_OI.numel(), "zeros": zeros, "sparsity": zeros / weight_OI.numel()}
    if isinstance(pattern, Blocks):
        empty = block_sums((weight_OI != 0).long(), pattern) == 0
        row |= {"blocks": block_sizes(weight_OI.shape, pattern).numel(), "zero_blocks": int(empty.sum())}
    return row | emptied(weight_OI)


def unread_figures(model: nn.Module, key: str) -> dict[str, object]:
    """Returns how many `heads` and `neurons` no layer reads; both None, with a `reason`, if the model's structure is not supported.

    Args:
        model: The sparse model.
        key: Key path of the stage, for the reason.
    """
    try:
        return dict(unread(model, Structure.of(model, key)))
    except InputError as error:
        return {"heads": None, "neurons": None, "reason": error.lines[0]}
