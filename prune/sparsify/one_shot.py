"""One-shot sparsity: choose and zero weights without training, layer by layer.

    magnitude   the smallest weights                             Han et al. 2015, https://arxiv.org/abs/1506.02626, section 3
    wanda       the smallest weights times input norms           `prune.sparsify.wanda`, on the already sparse model (`prune.forward_order`)
    sparsegpt   the weights that the others compensate best      `prune.sparsify.sparsegpt`, on the already sparse model

All layers have the same sparsity. If the model's zeros are held (`foundation.training.kept_zeros`), they count towards it: magnitude and
wanda give them the lowest scores and change no other weight, sparsegpt holds them. Not supported: a sparsity per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from foundation.training.kept_zeros import keeps_zeros
from prune.forward_order import Features, in_forward_order, products, squares
from prune.sparsify.patterns import MatrixPattern, mask
from prune.sparsify.sparsegpt import sparsegpt
from prune.sparsify.wanda import wanda

OneShot = Literal["magnitude", "wanda", "sparsegpt"]


def zero_weights(
    method: OneShot,
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    pattern: MatrixPattern,
    sparsity: float,
    batches: Callable[[], Sequence[Features]],
    key: str,
    advance: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Sets weights of layers to zero, in place.

    Args:
        method: How to choose the weights.
        model: In evaluation mode.
        layers: Linear layers inside its blocks, by module name.
        pattern: The sparsity pattern.
        sparsity: Share of the weights to zero; ignored for N:M.
        batches: Returns the features of the calibration rows; not called by magnitude.
        key: Key path in the recipe, for messages.
        advance: Called with the number of layers finished.

    Returns:
        Names of the layers that no row reached; they are unchanged.
    """
    if method == "magnitude":
        for layer in layers.values():
            zero_gone(layer, mask(layer.weight.detach().abs(), pattern, sparsity))
            advance(1)
        return []

    def change(name: str, sums: Tensor) -> None:
        layer = layers[name]
        weight_OI = layer.weight.detach()
        if method == "sparsegpt":
            layer.weight.data = sparsegpt(weight_OI, sums, pattern, sparsity, held_OI=weight_OI == 0 if keeps_zeros(model) else None)
        else:
            zero_gone(layer, mask(wanda(weight_OI, sums), pattern, sparsity, by_output=True))

    return in_forward_order(model, layers, batches(), products if method == "sparsegpt" else squares, change, key, advance)


def zero_gone(layer: nn.Linear, kept_OI: Tensor) -> None:
    """Zeroes the weights of a layer outside the mask, in place."""
    with torch.no_grad():
        layer.weight.masked_fill_(~kept_OI.to(layer.weight.device), 0)
