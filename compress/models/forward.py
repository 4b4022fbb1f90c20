"""A model as a function: features in, logits out; and the layers that it multiplies with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def forward(model: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits, float32 `[n, C]`; of a causal language model `[n, L, V]`.

    Args:
        model: A loaded checkpoint.
        features: `input_ids`, `attention_mask`, ... int64 `[n, L]`, or `pixel_values` float32 `[n, channels, H, W]`.
    """
    logits: Tensor = model(**features).logits
    return logits.float()


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns every float linear layer by module name, in the order of the modules: encoder, pooler, head."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first parameter."""
    return next(model.parameters()).device
