"""Common parts of int8 layers in training: codes with the slopes of their scales, scales that learn, and when they compute how.

The formulas are as in `quantize.training.linear`: a value inside the range of codes passes its gradient on, one outside does not
(straight-through estimator), and the slope is the derivative of scale * code with respect to the scale.

A scale is learned relative to its calibrated value, s = s_0 * (1 + k p), starting at p = 0. AdamW changes p by about the learning rate per
step, whatever the gradient's magnitude, so s changes by k times that fraction of s_0 in every layer: k is how much faster scales learn than
weights. Layers that read the same tensor share one s_x, as an exported graph quantizes that tensor once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foundation.schemes.int8 import LayerScales, check_finite, levels
from foundation.schemes.scales import SMALLEST_SCALE
from foundation.training.processes.layer_share import LayerShare


@dataclass(frozen=True)
class Int8Arithmetic:
    """How a layer computes, apart from its tensors."""

    largest: int
    """Largest weight code."""
    pact: bool
    """Whether the input scale gets the gradient of PACT instead of LSQ."""
    products: torch.dtype
    """Dtype of the matrix products of the backward pass, bfloat16 or float32."""
    share: LayerShare | None = None
    """The share of this process in the layer; None if it has the whole layer."""
    computed: bool = False
    """Whether the weight is computed only for this pass, so that nothing else holds it until the backward pass."""


def codes_and_slope(x: Tensor, scale: Tensor, low: int, high: int, lsq: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Returns the codes of `x`, bit-equal to `foundation.schemes.int8.quantize`, and the derivative of scale * codes w.r.t. the scale.

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


class QatLayer(nn.Module):
    """A trainable layer with int8 arithmetic; in evaluation mode exactly its quantized layer.

    The layers that derive from it say how they compute: `evaluated` as their quantized layer, `trained` with gradients.
    """

    def set_up(self, name: str, start: LayerScales, input_scale: Scale, weight_scale: Scale, pact: bool) -> None:
        """Takes over name and scales.

        Args:
            name: Module path, for error messages.
            start: The initial scales.
            input_scale: Scale of the input; shared by layers that read the same tensor.
            weight_scale: Scale of each output channel.
            pact: Whether the input scale gets the gradient of PACT.
        """
        self.name, self.bits, self.pact = name, start.weight_bits, pact
        self.input_scale, self.weight_scale = input_scale, weight_scale
        self.shared: LayerShare | None = None

    def evaluated(self, x: Tensor) -> Tensor:
        """Returns the output of the quantized layer; raises InputError if the input holds NaN or infinity."""
        raise NotImplementedError

    def trained(self, x: Tensor, fixed: Int8Arithmetic) -> Tensor:
        """Returns the output with straight-through gradients, in the dtype of the products."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output, in the autocast dtype if autocast is on and the layer is in training mode, else in the dtype of the input;
        without a gradient in evaluation mode.

        Raises:
            InputError: The input holds NaN or infinity; names the layer.
        """
        if not self.training:
            with torch.no_grad():
                return self.evaluated(x)
        check_finite(self.name, x.detach())
        kind = x.device.type
        products = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        y = self.trained(x, Int8Arithmetic(levels(self.bits), self.pact, products, self.shared))
        return y if torch.is_autocast_enabled(kind) else y.to(x.dtype)
