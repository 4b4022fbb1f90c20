"""Quantize activations: with one scale for the tensor (w8a8), or a scale per token found on the way (w8a8-dynamic).

    per tensor   q = clamp(rint(x / s), -128, 127)                                   s is given
    per token    q = rint(x / s_n),   s_n = max(max_i |x_ni| / 127, 2^-63)           for the row (token) n

Bound: equal to the torch reference and to `foundation.schemes.int8` in every code and every bit of a scale.

Per token, one program reads its row twice, the second time from cache. Left out: a smoothing vector that no norm absorbs.

Shape suffixes: N rows, I inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.launch import Cost, Launch, bytes_of, cdiv, check_scale, check_tensor, power_of_two
from export.kernels.rounding import int8_codes, scale_of_largest

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LONGEST_BLOCK = 4096
OPERATIONS = 4
"""Operations per element: a division, two comparisons, a rounding."""


def quantize_tensor(x: Tensor, scale: float) -> Tensor:
    """Returns the codes of a tensor, int8 in its shape.

    Args:
        x: float32, float16 or bfloat16, any shape, contiguous, finite.
        scale: Positive; rounded to float32.

    Raises:
        InputError: The scale is not positive, or the tensor not contiguous.
    """
    check_scale("scale", scale)
    check_tensor("x", x, (-1,) * x.dim(), *FLOATS)
    codes = torch.empty_like(x, dtype=torch.int8)
    tensor_launch(x, scale, codes).run()
    return codes


def quantize_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes of an input, int8 `[..., I]` in [-127, 127], and the scale of each token, float32 `[..., 1]`.

    Args:
        x: float32, float16 or bfloat16 `[..., I]`, contiguous, finite, I at least 1.

    Raises:
        InputError: The tensor is not contiguous.
    """
    check_tensor("x", x, (-1,) * max(1, x.dim()), *FLOATS)
    codes = torch.empty_like(x, dtype=torch.int8)
    scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    token_launch(x, codes, scale).run()
    return codes, scale


def tensor_launch(x: Tensor, scale: float, codes: Tensor) -> Launch:
    """Returns the launch behind `quantize_tensor`."""
    arguments = {"x": x, "codes": codes, "scale": scale, "count": x.numel(), "BLOCK": 1024}
    return Launch(quantize_tensor_kernel, (cdiv(x.numel(), 1024),), arguments, Cost(bytes_of(x, codes), OPERATIONS * x.numel(), "fp32"))


def token_launch(x: Tensor, codes: Tensor, scale: Tensor) -> Launch:
    """Returns the launch behind `quantize_token`."""
    block = min(LONGEST_BLOCK, power_of_two(x.shape[-1]))
    arguments = {"x": x, "codes": codes, "scale": scale, "inputs": x.shape[-1], "BLOCK": block}
    return Launch(quantize_token_kernel, (scale.numel(),), arguments, Cost(bytes_of(x, codes, scale), OPERATIONS * x.numel(), "fp32"))


@triton.jit
def quantize_tensor_kernel(x: tl.pointer_type, codes: tl.pointer_type, scale: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program, one block of the tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    values = tl.load(x + at, inside, other=0.0).to(tl.float32)
    tl.store(codes + at, int8_codes(values, scale, -128), inside)


@triton.jit
def quantize_token_kernel(
    x: tl.pointer_type, codes: tl.pointer_type, scale: tl.pointer_type, inputs: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program, one row."""
    row = tl.program_id(0).to(tl.int64)
    x += row * inputs
    codes += row * inputs
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, inputs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + at, at < inputs, other=0.0).to(tl.float32)))
    step = scale_of_largest(tl.max(largest, 0))
    tl.store(scale + row, step)
    for start in range(0, inputs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, at < inputs, other=0.0).to(tl.float32)
        tl.store(codes + at, int8_codes(values, step, -127), at < inputs)


def reference_tensor(x: Tensor, scale: float) -> Tensor:
    """Returns what `quantize_tensor` returns, in torch."""
    steps = x.float() / torch.tensor(scale, dtype=torch.float32)
    return torch.round(steps).clamp(-128, 127).to(torch.int8)


def reference_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what `quantize_token` returns, in torch."""
    scale = torch.clamp(x.float().abs().amax(dim=-1, keepdim=True) / 127, min=2.0**-63)
    return torch.round(x.float() / scale).clamp(-127, 127).to(torch.int8), scale
