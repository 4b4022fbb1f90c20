"""Residual addition, LayerNorm or RMSNorm, and quantization, in one pass over each row.

    h = x + r                                               in float32; h = x without a residual
    LayerNorm   z = (h - mean h) / sqrt(mean (h - mean h)^2 + eps) * g + b        Ba et al. 2016, https://arxiv.org/abs/1607.06450
    RMSNorm     z = h / sqrt(mean h^2 + eps) * g                                  Zhang, Sennrich 2019, https://arxiv.org/abs/1910.07467
    codes       q = clamp(rint(z / s), -128, 127)           s given, or max(max |z| / 127, 2^-63) of the row

What the next residual addition reads is kept too, in the type of x: h where the norm comes before the layer (pre-norm), z where it comes
after (post-norm, as in BERT).

h equals torch's to the bit. Bound against the exact z of that h, where d is the square root above, z0 = (h - mean h) / d and u = 2^-24:

    |z - exact| <= 48 u (|g| (1 + |z0|) (1 + max |h| / d) + |b|)

max |h| is there because the mean is rounded before it is subtracted; 48 covers sums of 32 elements a thread and 512 threads. Codes equal
rint(z / s) of the exact z unless it lies within this bound of a tie.

The row stays in registers, and the mean is subtracted before the squares are added: a variance from mean h^2 - (mean h)^2 loses all digits
where the mean is large. Left out: rows of more than 16384.

Shape suffixes: N rows, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.dependent_launch import wait_for_inputs
from export.kernels.launch import Cost, Launch, bytes_of, check_scale, check_step, check_tensor, power_of_two
from export.kernels.rounding import int8_codes, scale_of_largest
from foundation.core.errors import InputError

LONGEST_ROW = 16384
OPERATIONS = 12
"""Operations per element: addition, two sums, difference, square, product, gain, bias, and the four of a quantization."""
Keep = Literal["sum", "norm"]


@dataclass(frozen=True)
class Norm:
    """A LayerNorm, or without a bias and with `centred` false an RMSNorm."""

    gain: Tensor
    """float32 [I]."""
    bias: Tensor | None
    """float32 [I], or None."""
    eps: float
    centred: bool = True
    """Whether the mean is subtracted."""

    def __post_init__(self) -> None:
        check_tensor("gain", self.gain, (-1,), torch.float32)
        if self.bias is not None:
            check_tensor("bias", self.bias, tuple(self.gain.shape), torch.float32)
        check_scale("eps", self.eps)
        if not 0 < len(self.gain) <= LONGEST_ROW:
            raise InputError("gain", f"{len(self.gain)} inputs given", f"rows have 1 to {LONGEST_ROW}")


def launch(
    x_NI: Tensor, residual_NI: Tensor | None, norm: Norm, codes_NI: Tensor | None, scale: float | Tensor, kept_NI: Tensor, keep: Keep
) -> Launch:
    """Returns the launch of a norm; a tensor as scale is written, a number is read; without codes nothing is quantized.

    Args:
        x_NI: float32, float16 or bfloat16 `[N, I]`, contiguous, finite.
        residual_NI: The same, or None.
        norm: Gain, bias and eps.
        codes_NI: Takes the codes, int8.
        scale: Scale of the codes; float32 `[N, 1]` takes one for each row.
        kept_NI: Takes what is kept, in the type of `x_NI`.
        keep: "sum" keeps h, "norm" keeps z.
    """
    (rows, inputs), scales_N = x_NI.shape, scale if isinstance(scale, Tensor) else None
    if not isinstance(scale, Tensor):
        check_step("scale", scale)
    arguments = {
        "x": x_NI, "residual": residual_NI, "gain": norm.gain, "bias": norm.bias, "eps": norm.eps,
        "codes": codes_NI, "scales": scales_N, "scale": 1.0 if isinstance(scale, Tensor) else scale, "kept": kept_NI,
        "inputs": inputs, "length": float(inputs), "CENTRED": norm.centred, "KEEP": keep, "BLOCK": power_of_two(inputs),
    }  # fmt: skip
    num_bytes = bytes_of(x_NI, residual_NI, norm.gain, norm.bias, codes_NI, scales_N, kept_NI)
    return Launch(norm_quantize_kernel, (rows,), arguments, Cost(num_bytes, OPERATIONS * rows * inputs, "fp32"), warps(inputs))


def warps(inputs: int) -> int:
    """Returns the warps that share a row: at most 32 elements a thread."""
    return 4 if inputs <= 2048 else 8 if inputs <= 8192 else 16


@triton.jit
def normalized(
    h: tl.tensor, at: tl.tensor, inputs: tl.tensor, length: tl.tensor,
    gain: tl.pointer_type, bias: tl.pointer_type, eps: tl.tensor, CENTRED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns z for a row in registers, float32, 0 past its end; `at` are the indices of the block, `length` is `inputs` as float32."""
    inside = at < inputs
    if CENTRED:
        h = tl.where(inside, h - tl.div_rn(tl.sum(h, 0), length), 0.0)
    spread = tl.sqrt_rn(tl.div_rn(tl.sum(h * h, 0), length) + eps)
    z = tl.div_rn(h, spread) * tl.load(gain + at, inside, other=0.0)
    if bias is not None:
        z += tl.load(bias + at, inside, other=0.0)
    return z


@triton.jit
def stored_codes(z: tl.tensor, at: tl.tensor, inputs: tl.tensor, codes: tl.pointer_type, scales: tl.pointer_type, scale: tl.tensor) -> None:
    """Stores the codes of a row, with its own scale if `scales` is given; both point at this row. Without codes, nothing."""
    if codes is not None:
        if scales is None:
            tl.store(codes + at, int8_codes(z, scale, -128), at < inputs)
        else:
            step = scale_of_largest(tl.max(tl.abs(z), 0))
            tl.store(scales, step)
            tl.store(codes + at, int8_codes(z, step, -127), at < inputs)


@triton.jit
def norm_quantize_kernel(
    x: tl.pointer_type, residual: tl.pointer_type, gain: tl.pointer_type, bias: tl.pointer_type, eps: tl.tensor,
    codes: tl.pointer_type, scales: tl.pointer_type, scale: tl.tensor, kept: tl.pointer_type,
    inputs: tl.tensor, length: tl.tensor, CENTRED: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, one row."""
    wait_for_inputs(DEPENDENT)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first, inside = row * inputs, at < inputs
    h = tl.load(x + first + at, inside, other=0.0).to(tl.float32)
    if residual is not None:
        h += tl.load(residual + first + at, inside, other=0.0).to(tl.float32)
    z = normalized(h, at, inputs, length, gain, bias, eps, CENTRED)
    if KEEP == "sum":
        tl.store(kept + first + at, h.to(kept.dtype.element_ty), inside)
    else:
        tl.store(kept + first + at, z.to(kept.dtype.element_ty), inside)
    stored_codes(z, at, inputs, codes if codes is None else codes + first, scales if scales is None else scales + row, scale)
