"""A convolution in quantization-aware training: the layer next to `quantize.training.linear.QatLinear`.

The forward pass convolves integer codes exactly and rescales once (`foundation.schemes.int8_convolution`). The backward pass is the
one of `quantize.training.linear`, with the gradients of a convolution for the two products of a linear layer: with x^ = s_x q_x,
W^ = s_w q_w and g the gradient of y

    dx = 1[inside] * (gradient of the convolution of x with W^, at g)
    dW = 1[inside] * (gradient of the convolution of x^ with W, at g)
    ds = 1 / sqrt(I * Q_P) * sum of dx^ * slope      I = C / groups * size of the kernel, the inputs of an output

Kept for the backward pass are x and W themselves; their codes and slopes are computed again.

Shape suffixes: B rows, C input channels, O outputs, I inputs of an output.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, LayerScales, quantize
from foundation.schemes.int8_convolution import Convolution, ConvolutionScales, Geometry, int8_convolution, int8_layer, per_channel
from quantize.training.straight_through import Int8Arithmetic, QatLayer, Scale, codes_and_slope, only_inside


class Int8ConvolutionFunction(torch.autograd.Function):
    """y = x * W + b in int8, with the straight-through gradients of the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        input_scale: Tensor,
        weight_scale_O: Tensor,
        bias_O: Tensor | None,
        geometry: Geometry,
        fixed: Int8Arithmetic,
    ) -> Tensor:
        """Returns the output `[B, O, size...]`, in the dtype of the backward products.

        Args:
            ctx: The autograd context.
            x: Float `[B, C, size...]`, finite.
            weight: float32 `[O, C / g, k...]`.
            input_scale: float32 `[]`, positive.
            weight_scale_O: float32 `[O]`, positive.
            bias_O: float32 `[O]`, or None.
            geometry: Geometry of the layer.
            fixed: The arguments without a gradient.
        """
        largest = fixed.largest
        ctx.save_for_backward(x, weight, input_scale, weight_scale_O)
        ctx.geometry, ctx.fixed = geometry, fixed
        codes_x = quantize(x.float(), input_scale, ACTIVATION_LOW, ACTIVATION_HIGH)
        codes_w = quantize(weight, _of_outputs(weight_scale_O, weight), -largest, largest)
        y = int8_convolution(codes_x, codes_w, geometry).float()
        y.mul_(per_channel(input_scale * weight_scale_O, y))
        if bias_O is not None:
            y += per_channel(bias_O, y)
        return y.to(fixed.products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments of `forward`."""
        x, weight, input_scale, weight_scale_O = ctx.saved_tensors
        needs, inputs, products, largest = ctx.needs_input_grad, weight[0].numel(), ctx.fixed.products, ctx.fixed.largest
        learned_x, learned_w = needs[2] and not ctx.fixed.pact, needs[3]
        codes_x, slope_x = codes_and_slope(x, input_scale, ACTIVATION_LOW, ACTIVATION_HIGH, products if learned_x else None)
        codes_w, slope_w = codes_and_slope(weight, _of_outputs(weight_scale_O, weight), -largest, largest, products if learned_w else None)
        g = gradient.to(products)
        grad_x = grad_W = grad_input_scale = grad_weight_scale = None
        rounded_W = (codes_w.float() * _of_outputs(weight_scale_O, codes_w)).to(products)
        wanted = [needs[0] or needs[2], needs[1] or needs[3], False]
        found_x, found_W, _ = _gradients(g, codes_x.to(products), rounded_W, ctx.geometry, wanted)
        if found_x is not None:
            slope_x = slope_x.to(products)
            if needs[2]:
                grad_input_scale = (found_x * slope_x).sum().float() / math.sqrt(inputs * ACTIVATION_HIGH)
            grad_x = only_inside(found_x, slope_x, -1, 1).to(x.dtype)
        if found_W is not None:
            found_W, slope_w = found_W.float().mul_(input_scale), slope_w.float()  # codes are exact in bfloat16, s_x * q is not
            if needs[3]:
                grad_weight_scale = (found_W * slope_w).flatten(1).sum(dim=1) / math.sqrt(inputs * largest)
            grad_W = only_inside(found_W, slope_w, -1, 1)
        grad_bias = g.transpose(0, 1).flatten(1).sum(dim=1).float() if needs[4] else None
        return grad_x, grad_W, grad_input_scale, grad_weight_scale, grad_bias, None, None


def _of_outputs(values_O: Tensor, weight: Tensor) -> Tensor:
    """Returns values [O] in a shape that broadcasts with a weight [O, C / g, k...]."""
    return values_O.reshape(-1, *[1] * (weight.dim() - 1))


def _gradients(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: list[bool]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of a convolution of `x` with `weight`, at `g`, with respect to both; None where not wanted."""
    uneven = any(before != after for before, after in geometry.padding)
    ends = [zeros for pair in reversed(geometry.padding) for zeros in pair]
    padded = nn.functional.pad(x, ends) if uneven else x
    padding = [0] * len(geometry.padding) if uneven else [before for before, _ in geometry.padding]
    found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        g, padded, weight, None, geometry.stride, padding, geometry.dilation, False, [0] * len(padding), geometry.groups, wanted
    )
    of_x, of_weight, of_bias = found
    if uneven and of_x is not None:
        of_x = nn.functional.pad(of_x, [-zeros for zeros in ends])
    return of_x, of_weight, of_bias


class QatConvolution(QatLayer):
    """A trainable convolution with int8 arithmetic; in evaluation mode exactly `Int8Convolution`.

    Args:
        name: Module path, for error messages.
        layer: The layer whose parameters it takes over.
        start: The initial scales.
        input_scale: Scale of the input; shared by layers that read the same tensor.
        weight_scale: Scale of each output channel.
        pact: Whether the input scale gets the gradient of PACT.
    """

    def __init__(self, name: str, layer: Convolution, start: LayerScales, input_scale: Scale, weight_scale: Scale, pact: bool) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.set_up(name, start, input_scale, weight_scale, pact)
        self.geometry = Geometry.of(layer)
        self._layer = [layer]  # in a list, so that it is not a child: it shares the parameters of this module

    def scales(self) -> ConvolutionScales:
        """Returns the current scales."""
        return ConvolutionScales(self.weight_scale().detach(), self.input_scale().detach(), self.bits)

    def floating(self) -> Convolution:
        """Returns the plain convolution with the same parameters."""
        (layer,) = self._layer
        layer.weight, layer.bias = self.weight, self.bias
        return layer

    def evaluated(self, x: Tensor) -> Tensor:
        """Returns the output of `Int8Convolution`, `[B, O, size...]`."""
        output: Tensor = int8_layer(self.name, self.floating(), self.scales())(x)
        return output

    def trained(self, x: Tensor, fixed: Int8Arithmetic) -> Tensor:
        """Returns the output with straight-through gradients, `[B, O, size...]`, in the dtype of the products."""
        y: Tensor = Int8ConvolutionFunction.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.input_scale(), self.weight_scale(), self.bias, self.geometry, fixed
        )
        return y
