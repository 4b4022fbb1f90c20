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

A layer that several processes share has a part of the outputs (columns) or of the inputs (rows), see `compress.training.layer_share`. The
integers of rows are summed before they are rescaled, so that y has the bits that one process computes. Of what is whole, each process has
a part of the gradient: dx and ds_x of columns, ds_x and ds_w of rows are summed. I is the number of all inputs.

Tensor names carry their shapes: N rows (tokens), I inputs, O outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, Int8Linear, LayerScales, int8_matmul
from compress.training.layer_share import LayerShare, local
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
        rows = fixed.share if fixed.share is not None and not fixed.share.columns else None
        outputs, inputs = weight_OI.shape
        learned_x, learned_w = ctx.needs_input_grad[2] and not pact, ctx.needs_input_grad[3]
        x_NI = x.reshape(-1, inputs)
        codes_NI, slope_NI = codes_and_slope(x_NI, input_scale, ACTIVATION_LOW, ACTIVATION_HIGH, products if learned_x else None)
        codes_OI, slope_OI = codes_and_slope(weight_OI, weight_scale_O[:, None], -largest, largest, products if learned_w else None)
        ctx.save_for_backward(codes_NI, slope_NI, codes_OI, slope_OI, input_scale, weight_scale_O)
        ctx.shape, ctx.type, ctx.products, ctx.largest = x.shape, x.dtype, products, largest
        ctx.inputs = inputs * (rows.processes if rows else 1)
        accumulated_NO = int8_matmul(codes_NI, codes_OI)
        y_NO = (rows.total(accumulated_NO) if rows else accumulated_NO).float().mul_(input_scale * weight_scale_O)
        if bias_O is not None:
            y_NO += bias_O
        return y_NO.reshape(*x.shape[:-1], outputs).to(products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments of `forward`."""
        codes_NI, slope_NI, codes_OI, slope_OI, input_scale, weight_scale_O = ctx.saved_tensors
        outputs, needs = len(codes_OI), ctx.needs_input_grad
        # torch accumulates bfloat16 sums in float32 and rounds once, so no sum below needs a float32 copy
        g_NO = gradient.reshape(-1, outputs).to(ctx.products)
        grad_x = grad_W = grad_input_scale = grad_weight_scale = None
        if needs[0] or needs[2]:
            grad_NI = g_NO @ (codes_OI.float() * weight_scale_O[:, None]).to(ctx.products)
            slope_NI = slope_NI.to(ctx.products)
            if needs[2]:
                grad_input_scale = (grad_NI * slope_NI).sum().float() / math.sqrt(ctx.inputs * ACTIVATION_HIGH)
            grad_x = only_inside(grad_NI, slope_NI, -1, 1).reshape(ctx.shape).to(ctx.type)
        if needs[1] or needs[3]:
            grad_OI = (g_NO.T @ codes_NI.to(ctx.products)).float().mul_(input_scale)  # codes are exact in bfloat16, s_x * q is not
            slope_OI = slope_OI.float()
            if needs[3]:
                grad_weight_scale = (grad_OI * slope_OI).sum(dim=1) / math.sqrt(ctx.inputs * ctx.largest)
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
        """Returns the current scales, as far as this process has them."""
        smooth = None if self.smooth is None else local(self.smooth)
        return LayerScales(local(self.weight_scale().detach()), self.input_scale().detach(), self.bits, smooth)

    def floating(self) -> nn.Linear:
        """Returns a plain linear layer with the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear

    def axes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the axis of outputs, and the axis of inputs, of the tensors that have one; see `compress.training.layer_share`."""
        of_outputs = {"bias": 0, "weight_scale.start": 0, "weight_scale.change": 0}
        if not parametrize.is_parametrized(self, "weight"):
            return {"weight": 0, **of_outputs}, {"weight": 1, "smooth": 0}
        inside = "parametrizations.weight"
        return (
            {f"{inside}.original": 0, f"{inside}.0.b_Or": 0, **of_outputs},
            {f"{inside}.original": 1, f"{inside}.0.a_rI": 1, "smooth": 0},
        )

    def share(self, share: LayerShare) -> None:
        """Cuts the tensors of the layer to those of one process, in place."""
        share.cut(self, self.axes()[0 if share.columns else 1])
        self.shared = share
        if parametrize.is_parametrized(self, "weight"):
            changes: Any = self.parametrizations
            for change in changes["weight"]:
                change.shared = share

    def evaluated(self, x: Tensor) -> Tensor:
        """Returns the output of `Int8Linear`, `[..., O]`."""
        scales, bias_O = self.scales(), None if self.bias is None else local(self.bias.detach()).float()
        layer = Int8Linear(self.name, scales.codes(local(self.weight.detach()).float()), scales, bias_O)
        accumulated_NO = layer.accumulated(x)
        if self.shared is not None and not self.shared.columns:
            accumulated_NO = self.shared.total(accumulated_NO)
        return layer.rescaled(accumulated_NO, x)

    def trained(self, x: Tensor, fixed: Int8Arithmetic) -> Tensor:
        """Returns the output with straight-through gradients, `[..., O]`, in the dtype of the products."""
        weight_OI, bias_O = local(self.weight), None if self.bias is None else local(self.bias)
        input_scale, weight_scale_O = self.input_scale(), local(self.weight_scale())
        if self.shared is not None:
            input_scale = self.shared.read(input_scale)
            if self.shared.columns:
                x = self.shared.read(x)
            else:
                weight_scale_O = self.shared.read(weight_scale_O)
        if self.smooth is not None:
            smooth_I = local(self.smooth)
            x, weight_OI = x.float() * smooth_I.reciprocal(), weight_OI * smooth_I
        y: Tensor = Int8Function.apply(x, weight_OI, input_scale, weight_scale_O, bias_O, fixed)  # type: ignore[no-untyped-call]
        return y
