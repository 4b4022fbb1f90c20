"""Weight norm (https://arxiv.org/abs/1602.07868) folded into the weight of its layer, and put back when a model is saved.

    W = g v / ||v||      g has one entry for each position of one axis, ||v|| is the norm over all others

The positional convolution of Wav2Vec2 and HuBERT stores g and v. With W in their place it is a plain convolution, which quantization and
export can read. A weight is saved as v = W and g = ||W||, which is W again: exactly for us (`_weight`), up to the rounding of a division
for stock Transformers. Left out: training g and v on their own; the folded weight is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SAME = 1e-6
"""Relative difference below which g counts as the norm of v."""


def fold_weight_norm(model: nn.Module) -> None:
    """Replaces g and v of every layer by its weight, in place."""
    from torch.nn.utils import parametrize

    for module in list(model.modules()):
        if _axis(module) is not None:
            layer: Any = module
            with torch.no_grad():
                weight = _weight(layer.parametrizations.weight.original0, layer.parametrizations.weight.original1, _axis(layer))
            trained = layer.parametrizations.weight.original1.requires_grad
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
            layer.weight = nn.Parameter(weight, requires_grad=trained)


def unfolded(stock: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state dict with g and v in place of the weights that a stock model stores so.

    Args:
        stock: A model of the stock class, whose weights are not read.
        state: The state dict of the folded model.
    """
    axes = {name: axis for name, module in stock.named_modules() if (axis := _axis(module)) is not None}
    made: dict[str, Tensor] = {}
    for name, value in state.items():
        owner, _, last = name.rpartition(".")
        if last == "weight" and owner in axes:
            start = f"{owner}.parametrizations.weight"
            made[f"{start}.original0"], made[f"{start}.original1"] = torch.norm_except_dim(value, 2, axes[owner]), value
        else:
            made[name] = value
    return made


def _axis(module: nn.Module) -> int | None:
    """Returns the axis of g of a layer with weight norm; None for other layers."""
    found = getattr(getattr(module, "parametrizations", None), "weight", None)
    axis = getattr(found[0], "dim", None) if found is not None and type(found[0]).__name__ == "_WeightNorm" else None
    return None if axis is None else int(axis)


def _weight(g: Tensor, v: Tensor, axis: int | None) -> Tensor:
    """Returns g v / ||v||: v itself where g is its norm, so that weights on a grid stay on it."""
    norm = torch.norm_except_dim(v, 2, -1 if axis is None else axis)
    return torch.where(torch.abs(g - norm) <= SAME * norm, v, v * (g / norm)).contiguous()
