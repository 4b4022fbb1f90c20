"""Zeros without training: which weights go and what the others become, layer by layer.

    magnitude   the smallest weights                     Han et al. 2015, https://arxiv.org/abs/1506.02626, section 3
    wanda       those that do least on real rows         `prune.sparsify.wanda`, the inputs of pruned layers before (`prune.forward_order`)
    sparsegpt   those that the others can make up for    `prune.sparsify.sparsegpt`, the same

All layers lose the same share. Zeros that the model says it keeps (`compress.training.kept_zeros`) are among those that go: the first two
zero the lowest scores, theirs, and change no other weight; of the third they are held. Left out: a share for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from compress.training.kept_zeros import keeps_zeros
from prune.forward_order import Features, in_forward_order, products, squares
from prune.sparsify.patterns import Pattern, mask
from prune.sparsify.sparsegpt import sparsegpt
from prune.sparsify.wanda import wanda

OneShot = Literal["magnitude", "wanda", "sparsegpt"]


def zero_weights(
    method: OneShot,
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    pattern: Pattern,
    sparsity: float,
    batches: Callable[[], Sequence[Features]],
    key: str,
    advance: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Puts zeros into the weights of layers, in place.

    Args:
        method: How the weights that go are chosen.
        model: In evaluation mode.
        layers: The layers, inside of its blocks, by module name.
        pattern: Where zeros may be.
        sparsity: Share of the weights to zero; not looked at for N:M.
        batches: Gives the features of the calibration rows; not asked by magnitude.
        key: Key path in the recipe, for messages.
        advance: Is told how many layers are done.

    Returns:
        The names of layers that no row reached; they are as they were.
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
    """Zeroes the weights of a layer that do not stay, in place."""
    with torch.no_grad():
        layer.weight.masked_fill_(~kept_OI.to(layer.weight.device), 0)
