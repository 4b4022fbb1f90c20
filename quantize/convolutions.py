"""Which convolutions are quantized.

The setting `convolutions` decides; a convolution that the scheme, its class or its padding does not allow stays float in any case.

    false   none
    true    all, also the one that reads the image: the patch embedding of a ViT
    auto    those that the blocks of a model are made of: the ones inside its repeated blocks, if no attention lies between linear layers

So under `auto` the convolutions of ResNet, RegNet, ConvNeXt and PoolFormer are int8, except the first, which reads the image: it has few
multiplications, and an image has large even areas whose small differences matter. In a Transformer the linear layers hold nearly all
multiplications; its patch embedding and the few convolutions besides attention stay float. A Transformer whose layers are all convolutions
(MobileViTv2, SqueezeBERT) counts as made of convolutions.

Attention is recognised by running the model on a few rows: it calls softmax or scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foundation.schemes.int8_convolution import CONVOLUTIONS
from foundation.schemes.table import SCHEMES, Scheme, schemes_with

Choice = Literal["auto"] | bool
ATTENTION = frozenset({"softmax", "_softmax", "scaled_dot_product_attention"})
OFF = "convolutions: false"
READS_IMAGE = "it reads the image; convolutions: true quantizes it"
OUTSIDE = "a convolution outside the blocks; convolutions: true quantizes it"
BESIDE_ATTENTION = "a convolution of a model with attention; convolutions: true quantizes it"


def convolutions(model: nn.Module) -> dict[str, nn.Conv1d | nn.Conv2d]:
    """Returns all float convolutions over one or two axes by module name, in model order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CONVOLUTIONS)}


def float_convolutions(
    model: nn.Module,
    scheme: Scheme,
    choice: Choice,
    features: Mapping[str, Tensor],
    forward: Callable[[nn.Module, Mapping[str, Tensor]], object],
) -> dict[str, str]:
    """Returns the convolutions that stay float, each with the reason.

    Args:
        model: The float model.
        scheme: The scheme.
        choice: The setting `convolutions`.
        features: Features of a few rows.
        forward: Runs the model on features.
    """
    found = convolutions(model)
    kept = {name: reason for name, layer in found.items() if (reason := _unable(layer, scheme)) is not None}
    if not found or choice is True:
        return kept
    if choice is False:
        return dict.fromkeys(found, OFF) | kept
    blocks = block_prefixes(model)
    reading, attends = _run(model, found, features, forward)
    attends = attends and any(isinstance(module, nn.Linear) and name.startswith(blocks) for name, module in model.named_modules())
    for name in found:
        reason = BESIDE_ATTENTION if attends else None if name.startswith(blocks) else OUTSIDE
        reason = READS_IMAGE if name in reading else reason
        if reason is not None:
            kept.setdefault(name, reason)
    return kept


def block_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Returns the name prefixes of repeated blocks, the entries of `nn.ModuleList`s."""
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))


def _unable(layer: nn.Conv1d | nn.Conv2d, scheme: Scheme) -> str | None:
    """Returns why a convolution cannot be quantized; None if it can."""
    if SCHEMES[scheme].convolutions is None:
        return f"scheme {scheme} has no convolutions; {schemes_with(lambda row: row.convolutions is not None)} has"
    if type(layer) not in CONVOLUTIONS:
        return f"{type(layer).__name__} computes more than a convolution"
    if layer.padding_mode != "zeros":
        return f"it pads with {layer.padding_mode}, not with zeros"
    return None


class _Names(TorchFunctionMode):
    """Records the names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        self.called.add(str(getattr(func, "__name__", "")))
        return func(*args, **(kwargs or {}))


def _run(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    features: Mapping[str, Tensor],
    forward: Callable[[nn.Module, Mapping[str, Tensor]], object],
) -> tuple[Collection[str], bool]:
    """Returns the layers that read an input of the model as it is, and whether the model computes attention."""
    reading: set[str] = set()

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def compare(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if any(inputs[0].shape == value.shape and torch.equal(inputs[0], value.to(inputs[0])) for value in features.values()):
                reading.add(name)

        return compare

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad(), _Names() as names:
            forward(model, features)
    finally:
        for handle in handles:
            handle.remove()
    return reading, not ATTENTION.isdisjoint(names.called)
