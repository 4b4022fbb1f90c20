"""A linear layer in quantization-aware training.

The layer quantizes its input x and weight W, multiplies the codes exactly and rescales once (`foundation.schemes.int8`):

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
Codes cannot distinguish the two, but the slope can: inside its magnitude is at most 1/2, outside it is Q_P or -Q_N.

Kept for the backward pass are x and W themselves, no copies: W is there anyway, x is one tensor for all layers that read it (query, key and
value), and often one that its producer keeps too. Codes and slopes are computed from them once more, to the same bits. A weight that is
computed only for the pass (`quantize.training.low_rank`) is kept as its codes (int8) and slopes instead: 3 bytes for each weight with
slopes in bfloat16, 2 with the slopes of pact, which are int8, 5 in float32.

A smoothing vector (`foundation.schemes.int8`) divides x and multiplies W before they are rounded.

A layer that several processes share has a part of the outputs (columns) or of the inputs (rows), see
`foundation.training.processes.layer_share`. The integers of rows are summed before they are rescaled, so that y has the bits that one
process computes. Of what is whole, each process has a part of the gradient: dx and ds_x of columns, ds_x and ds_w of rows are summed. I is
the number of all inputs.

Tensor names carry their shapes: N rows (tokens), I inputs, O outputs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, Int8Linear, LayerScales, int8_matmul, quantize
from foundation.training.processes.layer_share import LayerShare, local
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
        smooth_I: Tensor | None,
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
            smooth_I: float32 `[I]`, positive: x is divided and W multiplied by it; None for no smoothing.
            fixed: The arguments without a gradient.
        """
        rows = fixed.share if fixed.share is not None and not fixed.share.columns else None
        outputs, inputs = weight_OI.shape
        v_NI, v_OI = _divided(x, smooth_I), _multiplied(weight_OI, smooth_I)
        codes_NI = quantize(v_NI.float(), input_scale, ACTIVATION_LOW, ACTIVATION_HIGH)
        kept_OI: tuple[Tensor, ...] = (weight_OI,)
        if fixed.computed:
            kept_OI = _of_weight(v_OI, weight_scale_O, fixed, ctx.needs_input_grad[3])
        codes_OI = kept_OI[0] if fixed.computed else quantize(v_OI, weight_scale_O[:, None], -fixed.largest, fixed.largest)
        ctx.save_for_backward(x, input_scale, weight_scale_O, smooth_I, *kept_OI)
        ctx.fixed, ctx.inputs = fixed, inputs * (rows.processes if rows else 1)
        accumulated_NO = int8_matmul(codes_NI, codes_OI)
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32, device=x.device)  # no view: models scale queries in place
        y_NO = y.view(-1, outputs)
        torch.mul(rows.total(accumulated_NO) if rows else accumulated_NO, input_scale * weight_scale_O, out=y_NO)
        if bias_O is not None:
            y_NO += bias_O
        return y.to(fixed.products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments of `forward`."""
        x, input_scale, weight_scale_O, smooth_I, *kept_OI = ctx.saved_tensors
        fixed, needs, outputs = ctx.fixed, ctx.needs_input_grad, len(weight_scale_O)
        computed_again = () if fixed.computed else _of_weight(_multiplied(kept_OI[0], smooth_I), weight_scale_O, fixed, needs[3])
        codes_OI, slope_OI = computed_again or kept_OI
        lsq = fixed.products if needs[2] and not fixed.pact else None
        codes_NI, slope_NI = codes_and_slope(_divided(x, smooth_I), input_scale, ACTIVATION_LOW, ACTIVATION_HIGH, lsq)
        # torch accumulates bfloat16 sums in float32 and rounds once, so no sum below needs a float32 copy
        g_NO = gradient.reshape(-1, outputs).to(fixed.products)
        grad_x = grad_W = grad_input_scale = grad_weight_scale = None
        if needs[0] or needs[2]:
            grad_NI = g_NO @ (codes_OI.float() * weight_scale_O[:, None]).to(fixed.products)
            slope_NI = slope_NI.to(fixed.products)
            if needs[2]:
                grad_input_scale = (grad_NI * slope_NI).sum().float() / math.sqrt(ctx.inputs * ACTIVATION_HIGH)
            grad_x = only_inside(grad_NI, slope_NI, -1, 1).reshape(x.shape)
            grad_x = (grad_x if smooth_I is None else grad_x.float() * smooth_I.reciprocal()).to(x.dtype)
        if needs[1] or needs[3]:
            grad_OI = (g_NO.T @ codes_NI.to(fixed.products)).float().mul_(input_scale)  # codes are exact in bfloat16, s_x * q is not
            slope_OI = slope_OI.float()
            if needs[3]:
                grad_weight_scale = (grad_OI * slope_OI).sum(dim=1) / math.sqrt(ctx.inputs * fixed.largest)
            grad_W = only_inside(grad_OI, slope_OI, -1, 1)
            grad_W = grad_W if smooth_I is None else grad_W * smooth_I
        grad_bias = g_NO.sum(dim=0).float() if needs[4] else None
        return grad_x, grad_W, grad_input_scale, grad_weight_scale, grad_bias, None, None


def _divided(x: Tensor, smooth_I: Tensor | None) -> Tensor:
    """Returns an input `[..., I]` as rows `[N, I]`, ready to round."""
    x_NI = x.reshape(-1, x.shape[-1])
    return x_NI if smooth_I is None else x_NI.float() * smooth_I.reciprocal()


def _multiplied(weight_OI: Tensor, smooth_I: Tensor | None) -> Tensor:
    """Returns a weight, ready to round."""
    return weight_OI if smooth_I is None else weight_OI * smooth_I


def _of_weight(v_OI: Tensor, scale_O: Tensor, fixed: Int8Arithmetic, learned: bool) -> tuple[Tensor, Tensor]:
    """Returns the codes of what is rounded of a weight, and their slopes."""
    return codes_and_slope(v_OI, scale_O[:, None], -fixed.largest, fixed.largest, fixed.products if learned else None)


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
        """Returns the axes of outputs and of inputs of tensors that have one; see `foundation.training.processes.layer_share`."""
        of_outputs = {"bias": 0, "weight_scale.start": 0, "weight_scale.change": 0}
        if not parametrize.is_parametrized(self, "weight"):
            return {"weight": 0, **of_outputs}, {"weight": 1, "smooth": 0}
        inside = "parametrizations.weight"
        return (
            {f"{inside}.original": 0, f"{inside}.0.b_Or": 0, **of_outputs},
            {f"{inside}.original": 1, f"{inside}.0.a_rI": 1, "smooth": 0},
        )

    def share(self, share: LayerShare) -> None:
        """Cuts the tensors of the layer to the shard of one process, in place."""
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
        smooth_I = None if self.smooth is None else local(self.smooth)
        fixed = replace(fixed, computed=parametrize.is_parametrized(self, "weight"))
        y: Tensor = Int8Function.apply(x, weight_OI, input_scale, weight_scale_O, bias_O, smooth_I, fixed)  # type: ignore[no-untyped-call]
        return y
