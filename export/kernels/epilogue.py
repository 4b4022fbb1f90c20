"""What ends every int8 GEMM: exact int32 sums to outputs, in the registers that hold the sums.

    static     y = float32(sum) * (s_x * s_w) + b          one scale for the input (w8a8)
    dynamic    y = float32(sum) * s_n * s_w + b            a scale per token (w8a8-dynamic)
    then       z = y,   GELU(y) = y / 2 * (1 + erf(y / sqrt 2)),   SiLU(y) = y / (1 + exp(-y)),   or   ReLU(y) = max(y, 0)
    then       z rounded to the output type, or requantized: clamp(rint(z / s_out), -128, 127)

y is `foundation.schemes.int8.Int8Linear` and `DynamicInt8Linear` to the bit: the same operations in the same order, each rounded on its
own.

Bounds: without an activation, and with ReLU, the output equals the torch reference to the bit, requantized or not. With another one,
|z - f(y)| <= 2^-20 |y| in float32 (erff of CUDA is good to 2 units in the last place, ex2.approx to 2 more), and codes equal the codes of
the exact f(y) / s_out unless it lies within 2^-20 |y| / s_out + 2^-16 of a tie.

Shape suffixes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.activation_codes import METHOD, Activation, Method, activated, activation_codes
from export.kernels.launch import check_scale, check_step, check_tensor
from export.kernels.rounding import int8_codes
from foundation.core.errors import InputError

FLOAT_OUTPUTS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Int8Weight:
    """The weight of an int8 linear layer; checked once, when it is made.

    Raises:
        InputError: Shapes or types do not fit, or a scale is not positive.
    """

    codes: Tensor
    """int8 [O, I]."""
    scale: Tensor
    """float32 [O]."""
    bias: Tensor | None = None
    """float32 [O]."""

    def __post_init__(self) -> None:
        check_tensor("codes", self.codes, (-1, -1), torch.int8)
        check_outputs(self.codes.shape[0], self.scale, self.bias)


@dataclass(frozen=True)
class Output:
    """What becomes of the products."""

    activation: Activation = "none"
    dtype: torch.dtype = torch.float16
    """float16, bfloat16 or float32; ignored with a scale."""
    scale: float | None = None
    """Requantizes to int8 with this scale."""
    method: Method = METHOD
    """How the codes of an activation are found; see `activation_codes`."""

    def __post_init__(self) -> None:
        if self.activation not in get_args(Activation):
            raise InputError("activation", f"{self.activation!r} given", f"{', '.join(get_args(Activation))} is allowed")
        if self.method not in get_args(Method):
            raise InputError("method", f"{self.method!r} given", f"{', '.join(get_args(Method))} is allowed")
        if self.dtype not in FLOAT_OUTPUTS:
            raise InputError("dtype", f"{self.dtype} given", "an output is float16, bfloat16 or float32, or int8 by a scale")
        if self.scale is not None:
            check_step("scale of the output", self.scale)

    @property
    def stored(self) -> torch.dtype:
        """The type in memory."""
        return self.dtype if self.scale is None else torch.int8


def check_outputs(outputs: int, scale_O: Tensor, bias_O: Tensor | None) -> None:
    """Raises an InputError unless weight scales and bias fit the number of outputs, and the scales are positive."""
    check_tensor("scale", scale_O, (outputs,), torch.float32)
    check_scale("scale", scale_O)
    if bias_O is not None:
        check_tensor("bias", bias_O, (outputs,), torch.float32)


@triton.jit
def rescaled(
    sums: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, outputs: tl.tensor,
    x_scale: tl.pointer_type, input_scale: tl.tensor, weight_scale: tl.pointer_type, bias: tl.pointer_type,
) -> tl.tensor:  # fmt: skip
    """Returns y for a tile of int32 sums, float32; `row` and `column` are its indices, `x_scale` and `bias` pointers or None."""
    weight_step = tl.load(weight_scale + column, column < outputs, other=1.0)
    y = sums.to(tl.float32)
    if x_scale is None:
        y *= (input_scale * weight_step)[None, :]
    else:
        y = y * tl.load(x_scale + row, row < rows, other=1.0)[:, None] * weight_step[None, :]
    if bias is not None:
        y += tl.load(bias + column, column < outputs, other=0.0)[None, :]
    return y


@triton.jit
def finished(
    y: tl.tensor,
    out: tl.pointer_type,
    at: tl.tensor,
    inside: tl.tensor,
    out_scale: tl.tensor,
    ACTIVATION: tl.constexpr,
    METHOD: tl.constexpr,
) -> None:
    """Stores f(y), requantized where `out` is int8."""
    if out.dtype.element_ty == tl.int8:
        tl.store(out + at, activation_codes(y, out_scale, ACTIVATION, METHOD), inside)
    else:
        tl.store(out + at, activated(y, ACTIVATION).to(out.dtype.element_ty), inside)


@triton.jit
def stored(z: tl.tensor, out: tl.pointer_type, at: tl.tensor, inside: tl.tensor, out_scale: tl.tensor) -> None:
    """Stores a block, requantized where `out` is int8."""
    if out.dtype.element_ty == tl.int8:
        tl.store(out + at, int8_codes(z, out_scale, -128), inside)
    else:
        tl.store(out + at, z.to(out.dtype.element_ty), inside)
