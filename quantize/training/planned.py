"""Prepares a model for quantization-aware training without data, to predict the memory of the training."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from foundation.models.layers.conv1d import with_linears
from foundation.schemes.int8 import LayerScales
from foundation.training.kept_zeros import block_linears
from quantize.choices import Qat
from quantize.training.low_rank import add_low_rank
from quantize.training.qat import TRAINED, insert

BITS = 8


def int8_layers(settings: Qat, exclude: Sequence[str]) -> Callable[[nn.Module], None]:
    """Returns a function that puts int8 layers into a model, in place; their scales are 1, and each reads a tensor of its own.

    Args:
        settings: The training settings.
        exclude: Layers that stay float, as patterns of module names with `*`.
    """
    return partial(_changed, settings, tuple(exclude))


def _changed(settings: Qat, exclude: tuple[str, ...], model: nn.Module) -> None:
    layers = block_linears(with_linears(model))
    chosen = {name: layer for name, layer in layers.items() if not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)}
    scales = {name: LayerScales(torch.ones(layer.out_features), torch.ones(()), BITS) for name, layer in chosen.items()}
    insert(model, scales, {name: name for name in scales}, settings.scales)
    if settings.lora is not None:
        add_low_rank(model, settings.lora, 0, "qat")
    if not settings.dropout:
        for module in model.modules():
            module.training = isinstance(module, TRAINED)
