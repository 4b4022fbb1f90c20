"""The forward pass of a model (features in, logits out), its linear layers, its device, and a model that only teaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foundation.machine.sharding import is_sharded


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


def uses_of_weights(model: nn.Module) -> Counter[int]:
    """Returns by `id(parameter)` how many modules have a parameter as their own: more than one where it is tied."""
    return Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))


def freeze(model: nn.Module) -> nn.Module:
    """Returns the model itself, in evaluation mode and without gradients of its parameters: a teacher."""
    return model.eval().requires_grad_(False)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Behind the block every module is in the mode, training or evaluation, that it was in before: a model may have some in either."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def device_of(model: nn.Module) -> torch.device:
    """Returns the device that a model computes on: where its first parameter is, or the device that its shards are gathered on."""
    first: Any = next(model.parameters())
    if is_sharded(first) and first.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())  # shards may be in host memory
    device: torch.device = first.device
    return device


def on_device(features: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns the features on a device."""
    return {name: value.to(device, non_blocking=True) for name, value in features.items()}


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Within the block a decoder keeps no keys and values, which nobody reads in a training, and to which a second run would append."""
    found: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())  # the decoder of T5 has one of its own
    configs = {id(config): config for config in found if hasattr(config, "use_cache")}
    before = [(config, config.use_cache) for config in configs.values()]
    for config, _ in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value
