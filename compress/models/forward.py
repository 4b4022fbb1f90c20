"""The forward pass of a model (features in, logits out), its linear layers and its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def forward(model: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits, float32 `[n, C]`, or `[n, L, V]` for a causal language model.

    Args:
        model: A loaded checkpoint.
        features: `input_ids`, `attention_mask`, ... int64 `[n, L]`, or `pixel_values` float32 `[n, channels, H, W]`, or
            `input_values` float32 `[n, samples]` or `[n, frames, filters]`; on any device.
    """
    device = device_of(model)
    logits: Tensor = model(**{name: values.to(device) for name, values in features.items()}).logits
    return logits.float()


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns all float linear layers by module name, in model order: encoder, pooler, head."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first parameter."""
    return next(model.parameters()).device
