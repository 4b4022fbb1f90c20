"""Quantize activations with one scale for the tensor (w8a8); with a scale per token `norm` and `embedding` do.

    q = clamp(rint(x / s), -128, 127)

Bound: equal to `foundation.schemes.int8` in every code. Left out: a smoothing vector that no norm absorbs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from export.kernels.launch import Cost, Launch, bytes_of, cdiv, check_step
from export.kernels.rounding import int8_codes

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


@triton.jit
def quantize_tensor_kernel(x: tl.pointer_type, codes: tl.pointer_type, scale: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program, one block of the tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    values = tl.load(x + at, inside, other=0.0).to(tl.float32)
    tl.store(codes + at, int8_codes(values, scale, -128), inside)
