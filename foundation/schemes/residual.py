"""Int8 residual additions: the residual that is added to the output of an int8 linear layer is quantized too.

    x + r   becomes   x + s_r * clamp(rint(r / s_r), -128, 127)        x: output of the layer, r: residual, s_r: one scale for the tensor

TensorRT requires this to fuse the addition with the GEMM ("quantize the residual input of an Add that follows a GEMM"). x is not quantized:
the GEMM returns its sums in float.

One mechanism finds, observes and quantizes the additions of any architecture. A forward hook on the layer turns its output into a marked
tensor (a tensor subclass). The mark survives dropout and reshapes. When a marked tensor is added to another tensor of the same shape, that
other operand is passed through the child `int8_residual` of the layer. The addition removes the mark, and so does any other operation that
reads the output: tanh-GELU, for instance, adds x to a multiple of x^3, which is not a residual. A site is therefore named after the layer
that it follows, `<layer>/residual`; `export.graph.qdq_products` finds it in an ONNX graph by the same walk from the GEMM to the addition.

Not supported: additions that do not directly follow a linear layer (layer scale, parallel attention and feed-forward).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, check_finite, quantize

RESIDUAL = "int8_residual"
"""Name of the child module that quantizes the residual."""
ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
UNCHANGED = frozenset({"dropout", "view", "reshape", "contiguous", "to", "type"})


class Int8Residual(nn.Module):
    """Quantizes and dequantizes a residual.

    Args:
        name: Name of the site, for messages.
        scale: float32 [].
    """

    scale: Tensor

    def __init__(self, name: str, scale: Tensor) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("scale", scale, persistent=False)  # stock Transformers can load the saved model

    def forward(self, residual: Tensor) -> Tensor:
        """Returns the residual rounded to its grid, in the same shape and dtype.

        Raises:
            InputError: The residual holds NaN or infinity.
        """
        check_finite(self.name, residual)
        codes = quantize(residual.float(), self.scale, ACTIVATION_LOW, ACTIVATION_HIGH)
        return (codes.float() * self.scale).to(residual.dtype)


def mark(layer: nn.Module, inputs: object, output: Tensor) -> LayerOutput:
    """Forward hook for a layer with a child `RESIDUAL`: marks its output."""
    return LayerOutput.of(output, _Mark(layer.get_submodule(RESIDUAL)))


@dataclass
class _Mark:
    """State shared by an output and its reshaped views."""

    residual: nn.Module
    """The module that quantizes the residual."""
    ended: bool = False
    """Whether another operation has already read the output."""


class LayerOutput(Tensor):
    """The marked output of a layer, possibly reshaped."""

    mark: _Mark

    @classmethod
    def of(cls, output: Tensor, mark: _Mark) -> LayerOutput:
        """Returns `output` with a mark."""
        marked = output.as_subclass(cls)
        marked.mark = mark
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`: quantizes the other operand of an addition, and keeps the mark if `func` does not change values."""
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
    """Returns the operands of an addition, with a residual quantized."""
    if isinstance(first, LayerOutput) and _is_residual(second, first):
        return first, first.mark.residual(second)
    if isinstance(second, LayerOutput) and _is_residual(first, second):
        return second.mark.residual(first), second
    return first, second


def _is_residual(other: object, output: LayerOutput) -> bool:
    """Whether `other` is a residual: a float activation of the same shape that is neither derived from `output` nor a marked output."""
    if not isinstance(other, Tensor) or isinstance(other, LayerOutput | nn.Parameter):
        return False
    return not output.mark.ended and other.is_floating_point() and other.shape == output.shape
