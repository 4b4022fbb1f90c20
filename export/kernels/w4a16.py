"""w4a16 GEMM: packed int4 weights are read as they are stored, a quarter of the bytes of float16. Made for small batches.

    y = x @ (s (q - z)).T + b          s, z one per output and group of g inputs; z = 0 for symmetric quantization
    then f(y): GELU, its tanh form or SiLU, as in `epilogue`

Codes are packed as `foundation.schemes.int4.pack` packs them: input 2p in the low half of byte p, input 2p + 1 in the high half. A weight
s (q - z) is rounded to the type of x, float16 or float32, as in `foundation.schemes.int4.Int4Linear`; products of float16 are exact in
float32, and added in float32. With float32 there are no matrix instructions.

Bound against float64 with the same rounded weights, with u = 2^-24:

    |y - exact| <= 2 (I + 2) u (sum_i |x_i w_i| + |b|) + 1.001 u16 |exact| + 2^-24        u16 = 2^-11, for float32 2^-24

the sums of matrix instructions are cut, not rounded, hence the 2. One program computes up to 16 rows, or 64 of more, and 64 outputs: with
few rows the bytes of the weight should be the limit. To make float16 of a code takes 7 to 8 instructions; on an H100 these take longer than
its bytes.

Left out: bfloat16, which the interpreter cannot multiply; splitting a long I over programs; real offsets (K-quants).

Shape suffixes: N rows, I inputs, O outputs, G groups, P packed bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.activation_codes import Activation, activated
from export.kernels.dependent_launch import prefetch_rows, wait_for_inputs
from export.kernels.launch import Cost, Launch, bytes_of, cdiv, check_scale, check_tensor, unit_of
from foundation.core.errors import InputError

TILE_N, LARGE_N, TILE_O = 16, 64, 64
"""Rows of a tile, for up to 16 rows and for more, and its outputs."""
SHIFT, SHIFTED_BITS = tl.constexpr(2.0**23 + 8), tl.constexpr(0x4B000008)
"""2^23 + 8 and its bits as float32, where the spacing is 1: exclusive or with the 4 bits of a code q gives 2^23 + 8 + q."""
MOST_INPUTS, FEWEST_INPUTS = 128, 16
"""Inputs of a tile: at most, and at least, as the matrix instruction takes 16."""


@dataclass(frozen=True)
class Int4Weight:
    """The weight of a w4a16 layer, as `foundation.schemes.int4.Int4Linear` holds it; checked once, when it is made.

    Raises:
        InputError: Shapes or types do not fit, or a scale is not positive.
    """

    packed: Tensor
    """uint8 [O, P], P = ceil(I / 2)."""
    inputs: int
    """I."""
    group_size: int
    """Inputs that share a scale; the last group may be shorter."""
    scale: Tensor
    """float32 [O, G]."""
    zero_point: Tensor | None = None
    """int8 [O, G]; None for symmetric quantization."""
    bias: Tensor | None = None
    """float32 [O]."""

    def __post_init__(self) -> None:
        if self.inputs < 1 or self.group_size < 1:
            raise InputError("inputs, group_size", f"{self.inputs} and {self.group_size} given", "a layer has at least 1 of both")
        check_tensor("packed codes", self.packed, (-1, cdiv(self.inputs, 2)), torch.uint8)
        groups = (len(self.packed), cdiv(self.inputs, self.group_size))
        check_tensor("scale", self.scale, groups, torch.float32)
        check_scale("scale", self.scale)
        if self.zero_point is not None:
            check_tensor("zero point", self.zero_point, groups, torch.int8)
        if self.bias is not None:
            check_tensor("bias", self.bias, groups[:1], torch.float32)


def tile_inputs(group_size: int) -> int:
    """Returns the inputs of a tile: those of one group where the sizes allow, so that a tile has one scale per output."""
    largest_power = group_size & -group_size  # that divides the group
    return min(largest_power, MOST_INPUTS) if largest_power >= FEWEST_INPUTS else MOST_INPUTS // 2


def launch(x_NI: Tensor, weight: Int4Weight, out_NO: Tensor, activation: Activation = "none") -> Launch:
    """Returns the launch of a w4a16 layer.

    Args:
        x_NI: float16 or float32 `[N, I]`, contiguous.
        weight: Packed codes, scales, zero points and bias.
        out_NO: Takes the outputs, float16 or float32.
        activation: f.

    Raises:
        InputError: The input does not fit the weight.
    """
    check_tensor("x", x_NI, (-1, weight.inputs), torch.float16, torch.float32)
    (rows, inputs), outputs, tile_i = x_NI.shape, len(weight.packed), tile_inputs(weight.group_size)
    tile_n, unit = TILE_N if rows <= TILE_N else LARGE_N, unit_of(x_NI)
    arguments = {
        "x": x_NI, "packed": weight.packed, "scale": weight.scale, "zero_point": weight.zero_point, "bias": weight.bias, "out": out_NO,
        "rows": rows, "outputs": outputs, "inputs": inputs, "num_bytes": weight.packed.shape[1], "groups": weight.scale.shape[1],
        "GROUP": weight.group_size, "SHARED": weight.group_size % tile_i == 0,
        "ACTIVATION": activation, "TILE_N": tile_n, "TILE_O": TILE_O, "TILE_I": tile_i, "EVEN": inputs % tile_i == 0,
    }  # fmt: skip
    num_bytes = bytes_of(x_NI, weight.packed, weight.scale, weight.zero_point, weight.bias, out_NO)
    cost = Cost(num_bytes, 2 * rows * outputs * inputs, unit)
    return Launch(w4a16_gemm_kernel, (cdiv(rows, tile_n), cdiv(outputs, TILE_O)), arguments, cost, 4, 4)


@triton.jit
def w4a16_gemm_kernel(
    x: tl.pointer_type, packed: tl.pointer_type, scale: tl.pointer_type, zero_point: tl.pointer_type, bias: tl.pointer_type,
    out: tl.pointer_type, rows: tl.tensor, outputs: tl.tensor, inputs: tl.tensor, num_bytes: tl.tensor, groups: tl.tensor,
    GROUP: tl.constexpr, SHARED: tl.constexpr, ACTIVATION: tl.constexpr,
    TILE_N: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, one tile of the output."""
    tile_n, tile_o = tl.program_id(0), tl.program_id(1)
    if DEPENDENT:
        prefetch_rows(packed, tile_o * TILE_O, outputs, num_bytes, TILE_O)
    wait_for_inputs(DEPENDENT)
    n, o, i, p = tl.arange(0, TILE_N), tl.arange(0, TILE_O), tl.arange(0, TILE_I), tl.arange(0, TILE_I // 2)
    inside_n, inside_o = tl.minimum(n, rows - 1 - tile_n * TILE_N), tl.minimum(o, outputs - 1 - tile_o * TILE_O)
    first_o = tile_o.to(tl.int64) * TILE_O
    x_at = x + tile_n.to(tl.int64) * TILE_N * inputs + (inside_n[:, None] * inputs + i[None, :])
    packed_at = packed + first_o * num_bytes + (inside_o[:, None] * num_bytes + p[None, :])
    sums = tl.zeros((TILE_N, TILE_O), tl.float32)
    for start in range(0, inputs, TILE_I):
        if EVEN:
            x_tile, halves = tl.load(x_at), tl.load(packed_at)
        else:
            x_tile = tl.load(x_at, i[None, :] < inputs - start, other=0.0)
            halves = tl.load(packed_at, p[None, :] < num_bytes - start // 2, other=0)
        words = halves.to(tl.int32)
        shifted = tl.interleave((words & 15) ^ SHIFTED_BITS, (words >> 4) ^ SHIFTED_BITS).to(tl.float32, bitcast=True)
        if SHARED:
            group_at = first_o * groups + (inside_o[:, None] * groups + start // GROUP)
        else:
            group_at = first_o * groups + (inside_o[:, None] * groups + tl.minimum(start + i[None, :], inputs - 1) // GROUP)
        zero = SHIFT if zero_point is None else tl.load(zero_point + group_at).to(tl.float32) + SHIFT
        weight = ((shifted - zero) * tl.load(scale + group_at)).to(x_tile.dtype)
        sums = tl.dot(x_tile, tl.trans(weight), sums, input_precision="ieee")
        x_at += TILE_I
        packed_at += TILE_I // 2
    row, column = tile_n * TILE_N + n, tile_o * TILE_O + o
    if bias is not None:
        sums += tl.load(bias + column, column < outputs, other=0.0)[None, :]
    at = tile_n.to(tl.int64) * TILE_N * outputs + first_o + (n[:, None] * outputs + o[None, :])
    tl.store(out + at, activated(sums, ACTIVATION).to(out.dtype.element_ty), (row < rows)[:, None] & (column < outputs)[None, :])
