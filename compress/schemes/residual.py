"""Residual additions in int8: what is added to the output of an int8 linear layer is rounded to its grid.

    x + r   becomes   x + s_r * clamp(rint(r / s_r), -128, 127)        x: output of the layer, r: residual, s_r: one scale for the tensor

That is what TensorRT asks for to fuse the addition with the GEMM ("quantize the residual input of an Add that follows a GEMM"). x is not
quantized: the GEMM hands over its sums in float.

The additions of a model are found, observed and rounded in one way, whatever its architecture. A forward hook on the layer marks its
output: a tensor subclass that keeps its mark through dropout and reshapes, and that sends the other operand of an addition of its own
shape through the child `int8_residual` of the layer. Any other operation that reads the output ends the mark (GELU by tanh adds x to a
multiple of x^3, which is no residual), and so does the addition. A site is thus named by the layer it follows, `<layer>/residual`; the
same walk from the GEMM to the addition finds it in an ONNX graph (`export.graph.qdq_products`).

Left out: additions that follow no linear layer directly (layer scale, parallel attention and feed-forward).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, check_finite, quantize

RESIDUAL = "int8_residual"
"""Name of the child of a layer that residuals go through."""
ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
UNCHANGED = frozenset({"dropout", "view", "reshape", "contiguous", "to", "type"})


class Int8Residual(nn.Module):
    """Rounds a residual to its codes and back.

    Args:
        name: Of the site, for messages.
        scale: float32 [].
    """

    scale: Tensor

    def __init__(self, name: str, scale: Tensor) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("scale", scale, persistent=False)  # a saved model stays one of stock Transformers

    def forward(self, residual: Tensor) -> Tensor:
        """Returns the residual on its grid, in its own shape and type.

        Raises:
            InputError: It holds NaN or infinity.
        """
        check_finite(self.name, residual)
        codes = quantize(residual.float(), self.scale, ACTIVATION_LOW, ACTIVATION_HIGH)
        return (codes.float() * self.scale).to(residual.dtype)


def mark(layer: nn.Module, inputs: Any, output: Tensor) -> LayerOutput:
    """The forward hook of a layer with a child `RESIDUAL`."""
    return LayerOutput.of(output, _Mark(layer.get_submodule(RESIDUAL)))


@dataclass
class _Mark:
    """Shared by an output and its reshaped forms."""

    residual: nn.Module
    """What a residual has to go through."""
    ended: bool = False
    """Whether an operation has read the output."""


class LayerOutput(Tensor):
    """The output of a layer, as it is or reshaped."""

    mark: _Mark

    @classmethod
    def of(cls, output: Tensor, mark: _Mark) -> LayerOutput:
        """Returns an output with a mark."""
        marked = output.as_subclass(cls)
        marked.mark = mark
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`; sends the other operand of an addition through the module, and keeps the mark where nothing is changed."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*(args if kwargs or func.__name__ not in ADDITIONS else _operands(*args)), **(kwargs or {}))
            if not isinstance(result, Tensor):
                return result
            marks = [value.mark for value in args if isinstance(value, cls)]
            if func.__name__ in UNCHANGED and marks:
                return cls.of(result, marks[0])
            for mark in marks:
                mark.ended = True
            return result.as_subclass(Tensor)


def _operands(first: Tensor, second: Any) -> tuple[Any, Any]:
    """Returns the operands of an addition, a residual among them rounded."""
    if isinstance(first, LayerOutput) and _is_residual(second, first):
        return first, first.mark.residual(second)
    if isinstance(second, LayerOutput) and _is_residual(first, second):
        return second.mark.residual(first), second
    return first, second


def _is_residual(other: Any, output: LayerOutput) -> bool:
    """Whether what is added to the output of a layer is an activation of its shape, not made of it and no output of a layer itself."""
    activation = isinstance(other, Tensor) and not isinstance(other, LayerOutput | nn.Parameter)
    return activation and not output.mark.ended and other.is_floating_point() and other.shape == output.shape
