"""What int8 layers in training have in common: codes with the slopes of their scales, and scales that learn.

The formulas are those of `quantize.qat`: a value inside the range of codes passes its gradient on, one outside does not (straight-through
estimator), and the slope is the derivative of scale * code with respect to the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.schemes.int8 import SMALLEST_SCALE


@dataclass(frozen=True)
class Int8Arithmetic:
    """How a layer computes, apart from its tensors."""

    largest: int
    """Largest weight code."""
    pact: bool
    """Whether the input scale gets the gradient of PACT instead of LSQ."""
    products: torch.dtype
    """Dtype of the matrix products of the backward pass, bfloat16 or float32."""


def codes_and_slope(x: Tensor, scale: Tensor, low: int, high: int, lsq: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Returns the codes of `x`, bit-equal to `compress.schemes.int8.quantize`, and the derivative of scale * codes w.r.t. the scale.

    Args:
        x: Float, any shape.
        scale: float32, positive, of a shape that broadcasts with `x`.
        low: Smallest code.
        high: Largest code.
        lsq: Dtype of the LSQ slope; None for the PACT slope in int8. Both distinguish values inside the range from values outside.
    """
    v = x.float() / scale
    rounded = v.round().clamp_(low, high)
    codes = rounded.to(torch.int8)
    slope = rounded.sub_(only_inside(rounded if lsq is None else v, v, low, high))
    return codes, slope.to(torch.int8 if lsq is None else lsq)


def only_inside(values: Tensor, where: Tensor, low: float, high: float) -> Tensor:
    """Returns `values` where low < `where` < high, else 0, in one pass; the limits count as outside."""
    result: Tensor = torch.ops.aten.hardtanh_backward(values, where, low, high)
    return result


class Scale(nn.Module):
    """A learned scale s = start * (1 + rate * change), kept positive.

    Args:
        start: float32, positive, `[]` or `[O]`.
        rate: How many times faster it learns than weights.
        learned: Whether it is trained.
    """

    start: Tensor

    def __init__(self, start: Tensor, rate: float, learned: bool) -> None:
        super().__init__()
        self.register_buffer("start", start.detach().float().clone())
        self.change = nn.Parameter(torch.zeros_like(self.start), requires_grad=learned)
        self.rate = rate

    def forward(self) -> Tensor:
        """Returns the scale, float32 of the shape of `start`."""
        return (self.start * (1 + self.rate * self.change)).clamp(min=SMALLEST_SCALE)
