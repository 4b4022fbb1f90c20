"""A linear layer in quantization-aware training.

The layer quantizes its input x and weight W, multiplies the codes exactly and rescales once (`compress.schemes.int8`):

    v = x / s                      s: s_x of the tensor for x, s_w[o] of the output channel for W
    q = clamp(rint(v), -Q_N, Q_P)  Q_N, Q_P = 128, 127 for x; L, L with L = 127 (8 bits) or 63 (7 bits) for W
    y = float32(q_x @ q_w.T) * (s_x * s_w) + b

The backward pass uses the straight-through estimator (https://arxiv.org/abs/1308.3432): with x^ = s_x q_x, W^ = s_w q_w, g the gradient of
y

    dx = 1[-Q_N < v < Q_P] * (g @ W^),   dW = 1[-L < v < L] * (g.T @ x^)        both products in bfloat16 under autocast
    ds = 1 / sqrt(I * Q_P) * sum of dx^ * slope,   dx^ = g @ W^ for s_x, g.T @ x^ for s_w
    slope = q outside,  q - v inside     lsq:  Esser et al. 2020, https://arxiv.org/abs/1902.08153, eq. 3 and section 2.2
    slope = q outside,  0 inside         pact: Choi et al. 2018, https://arxiv.org/abs/1805.06085, section 3, for both signs, alpha = s Q_P

A value that rounds to Q_P but is below it counts as inside and gets a gradient; a value at or beyond Q_P counts as outside, as in LSQ.
Codes cannot distinguish the two, but the slope can: inside its magnitude is at most 1/2, outside it is Q_P or -Q_N. Only codes (int8) and
slope are saved for the backward pass. The slope of lsq has the dtype of the products (3 bytes per value in total with bfloat16), that of
pact is int8 (2 bytes in total). No float copy of x or W is saved.

Tensor names carry their shapes: N rows (tokens), I inputs, O outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from compress.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, LayerScales, int8_linear, int8_matmul
from quantize.training.straight_through import Int8Arithmetic, QatLayer, Scale, codes_and_slope, only_inside


class Int8Function(torch.autograd.Function):
    """y = x @ W.T + b in int8, with the straight-through gradients of the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        input_scale: Tensor,
        weight_scale_O: Tensor,
        bias_O: Tensor | None,
        fixed: Int8Arithmetic,
    ) -> Tensor:
        """Returns the output `[..., O]`, in the dtype of the backward products.

        Args:
            ctx: The autograd context.
            x: Float `[..., I]`, finite.
            weight_OI: float32 `[O, I]`.
            input_scale: float32 `[]`, positive.
            weight_scale_O: float32 `[O]`, positive.
            bias_O: float32 `[O]`, or None.
            fixed: The arguments without a gradient.
        """
        largest, pact, products = fixed.largest, fixed.pact, fixed.products
        outputs, inputs = weight_OI.shape
        learned_x, learned_w = ctx.needs_input_grad[2] and not pact, ctx.needs_input_grad[3]
        x_NI = x.reshape(-1, inputs)
        codes_NI, slope_NI = codes_and_slope(x_NI, input_scale, ACTIVATION_LOW, ACTIVATION_HIGH, products if learned_x else None)
        codes_OI, slope_OI = codes_and_slope(weight_OI, weight_scale_O[:, None], -largest, largest, products if learned_w else None)
        ctx.save_for_backward(codes_NI, slope_NI, codes_OI, slope_OI, input_scale, weight_scale_O)
        ctx.shape, ctx.type, ctx.products, ctx.largest = x.shape, x.dtype, products, largest
        y_NO = int8_matmul(codes_NI, codes_OI).float().mul_(input_scale * weight_scale_O)
        if bias_O is not None:
            y_NO += bias_O
        return y_NO.reshape(*x.shape[:-1], outputs).to(products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments of `forward`."""
        codes_NI, slope_NI, codes_OI, slope_OI, input_scale, weight_scale_O = ctx.saved_tensors
        (outputs, inputs), needs = codes_OI.shape, ctx.needs_input_grad
        # torch accumulates bfloat16 sums in float32 and rounds once, so no sum below needs a float32 copy
        g_NO = gradient.reshape(-1, outputs).to(ctx.products)
        grad_x = grad_W = grad_input_scale = grad_weight_scale = None
        if needs[0] or needs[2]:
            grad_NI = g_NO @ (codes_OI.float() * weight_scale_O[:, None]).to(ctx.products)
            slope_NI = slope_NI.to(ctx.products)
            if needs[2]:
                grad_input_scale = (grad_NI * slope_NI).sum().float() / math.sqrt(inputs * ACTIVATION_HIGH)
            grad_x = only_inside(grad_NI, slope_NI, -1, 1).reshape(ctx.shape).to(ctx.type)
        if needs[1] or needs[3]:
            grad_OI = (g_NO.T @ codes_NI.to(ctx.products)).float().mul_(input_scale)  # codes are exact in bfloat16, s_x * q is not
            slope_OI = slope_OI.float()
            if needs[3]:
                grad_weight_scale = (grad_OI * slope_OI).sum(dim=1) / math.sqrt(inputs * ctx.largest)
            grad_W = only_inside(grad_OI, slope_OI, -1, 1)
        grad_bias = g_NO.sum(dim=0).float() if needs[4] else None
        return grad_x, grad_W, grad_input_scale, grad_weight_scale, grad_bias, None


class QatLinear(QatLayer, nn.Linear):
    """A trainable linear layer with int8 arithmetic; in evaluation mode exactly `Int8Linear`.

    Args:
        name: Module path, for error messages.
        linear: The layer whose parameters it takes over.
        start: The initial scales.
        input_scale: Scale of the input; shared by layers that read the same tensor.
        weight_scale: Scale of each output channel.
        pact: Whether the input scale gets the gradient of PACT.
    """

    smooth: Tensor | None

    def __init__(self, name: str, linear: nn.Linear, start: LayerScales, input_scale: Scale, weight_scale: Scale, pact: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.set_up(name, start, input_scale, weight_scale, pact)
        self.register_buffer("smooth", start.input_smooth)

    def scales(self) -> LayerScales:
        """Returns the current scales."""
        return LayerScales(self.weight_scale().detach(), self.input_scale().detach(), self.bits, self.smooth)

    def floating(self) -> nn.Linear:
        """Returns a plain linear layer with the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear

    def evaluated(self, x: Tensor) -> Tensor:
        """Returns the output of `Int8Linear`, `[..., O]`."""
        output: Tensor = int8_linear(self.name, self, self.scales())(x)
        return output

    def trained(self, x: Tensor, fixed: Int8Arithmetic) -> Tensor:
        """Returns the output with straight-through gradients, `[..., O]`, in the dtype of the products."""
        smoothed, weight_OI = (x, self.weight) if self.smooth is None else (x.float() * self.smooth.reciprocal(), self.weight * self.smooth)
        y: Tensor = Int8Function.apply(  # type: ignore[no-untyped-call]
            smoothed, weight_OI, self.input_scale(), self.weight_scale(), self.bias, fixed
        )
        return y
