"""Quantize activations: with one scale for the tensor (w8a8), or one for each token (w8a8-dynamic), which `norm` writes too.

    tensor    q = clamp(rint(x / s), -128, 127)
    token     q = rint(x / s_n),   s_n = max(max_i |x_ni| / 127, 2^-63)

Bound: equal to `foundation.schemes.int8` in every code and scale. Left out: a smoothing vector that no norm absorbs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from export.kernels import norm
from export.kernels.dependent_launch import wait_for_inputs
from export.kernels.launch import Cost, Launch, bytes_of, cdiv, check_step, power_of_two
from export.kernels.rounding import int8_codes, scale_of_largest
from foundation.core.errors import InputError

OPERATIONS = 4
"""Operations per element: a division, two comparisons, a rounding."""


def tensor_launch(x: Tensor, scale: float, codes: Tensor) -> Launch:
    """Returns the launch of a quantization.

    Args:
        x: float32, float16 or bfloat16, any shape, contiguous, finite.
        scale: From 2^-63 to 2^120; rounded to float32.
        codes: Takes the codes, int8.
    """
    check_step("scale", scale)
    arguments = {"x": x, "codes": codes, "scale": scale, "count": x.numel(), "BLOCK": 1024}
    return Launch(quantize_tensor_kernel, (cdiv(x.numel(), 1024),), arguments, Cost(bytes_of(x, codes), OPERATIONS * x.numel(), "fp32"))


def token_launch(x_NI: Tensor, codes_NI: Tensor, scale_N: Tensor) -> Launch:
    """Returns the launch of a quantization with a scale per token.

    Args:
        x_NI: float32, float16 or bfloat16 `[N, I]`, contiguous, finite; I at most `norm.LONGEST_ROW`.
        codes_NI: Takes the codes, int8.
        scale_N: Takes the scales, float32 `[N, 1]`.
    """
    rows, inputs = x_NI.shape
    if inputs > norm.LONGEST_ROW:
        raise InputError("x", f"{inputs} inputs given", f"rows have 1 to {norm.LONGEST_ROW}")
    arguments = {"x": x_NI, "codes": codes_NI, "scales": scale_N, "inputs": inputs, "BLOCK": power_of_two(inputs)}
    cost = Cost(bytes_of(x_NI, codes_NI, scale_N), (OPERATIONS + 2) * rows * inputs, "fp32")
    return Launch(quantize_token_kernel, (rows,), arguments, cost, norm.warps(inputs))


@triton.jit
def quantize_token_kernel(
    x: tl.pointer_type, codes: tl.pointer_type, scales: tl.pointer_type, inputs: tl.tensor, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
) -> None:
    """One program, one token; it stays in registers."""
    wait_for_inputs(DEPENDENT)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * inputs + at, at < inputs, other=0.0).to(tl.float32)
    scale = scale_of_largest(tl.max(tl.abs(values), 0))
    tl.store(scales + row, scale)
    tl.store(codes + row * inputs + at, int8_codes(values, scale, -127), at < inputs)


@triton.jit
def quantize_tensor_kernel(
    x: tl.pointer_type, codes: tl.pointer_type, scale: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
) -> None:
    """One program, one block of the tensor."""
    wait_for_inputs(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    values = tl.load(x + at, inside, other=0.0).to(tl.float32)
    tl.store(codes + at, int8_codes(values, scale, -128), inside)
