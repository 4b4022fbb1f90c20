"""Linear layers with integer weights and float activations: the weights are dequantized, then multiplied in float.

    y = x @ W.T + b        W float32 [O, I], from the codes and scales of a scheme

x and the product have the dtype of the input. Schemes: `foundation.schemes.int4`, `foundation.schemes.int8_weights`.

Not supported: kernels that multiply the stored codes (the engines have those).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class WeightOnlyLinear(nn.Module):
    """Base of the layers with integer weights and float activations; dequantizes its weights in every call."""

    bias: Tensor | None
    cached_OI: Tensor | None = None
    """The dequantized weights inside of `dequantized_once`."""

    def dequantized(self) -> Tensor:
        """Returns the weights, float32 [O, I]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I], in the dtype of the input."""
        weight_OI = self.dequantized() if self.cached_OI is None else self.cached_OI
        return nn.functional.linear(x, weight_OI.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@contextmanager
def dequantized_once(model: nn.Module) -> Iterator[None]:
    """Keeps the float32 weights of such layers while it is entered: eight times the memory of packed int4 codes, four times the memory of
    int8.

    An answer calls every layer once a token, and to dequantize a weight takes many times as long as to multiply it by one row.
    """
    layers = [module for module in model.modules() if isinstance(module, WeightOnlyLinear)]
    for layer in layers:
        layer.cached_OI = layer.dequantized()
    try:
        yield
    finally:
        for layer in layers:
            layer.cached_OI = None
