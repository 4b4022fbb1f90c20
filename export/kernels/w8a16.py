"""GEMM of int8 weights and float activations: codes are read as they are stored, half of the bytes of float16. Made for small batches.

    y = (x @ q.T) * s + b              s one per output; for a head, q are the int8 rows of the table of words
    then f(y): GELU, its tanh form or SiLU, as in `epilogue`

A code is exact in float16, so that products are exact in float32 and added in float32; the scale comes last, where
`foundation.schemes.int8_weights` and `foundation.schemes.tables` multiply by s q. With float32 there are no matrix instructions.

Bound against float64, with u = 2^-24:

    |y - exact| <= 2 (I + 3) u (sum_i |x_i s q_i| + |b|) + 1.001 u16 |exact| + 2^-24        u16 = 2^-11, for float32 2^-24

the sums of matrix instructions are cut, not rounded, hence the 2. One program computes up to 16 rows, or 64 of more, and 64 outputs.

Left out: bfloat16, which the interpreter cannot multiply; splitting a long I over programs.

Shape suffixes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.activation_codes import Activation, activated
from export.kernels.dependent_launch import prefetch_rows, wait_for_inputs
from export.kernels.epilogue import Int8Weight
from export.kernels.launch import Cost, Launch, bytes_of, cdiv, check_tensor, unit_of

TILE_N, LARGE_N, TILE_O, TILE_I = 16, 64, 64, 128
"""Rows of a tile, for up to 16 rows and for more, its outputs, and inputs at a time."""


def launch(x_NI: Tensor, weight: Int8Weight, out_NO: Tensor, activation: Activation = "none") -> Launch:
    """Returns the launch of a w8a16 layer.

    Args:
        x_NI: float16 or float32 `[N, I]`, contiguous.
        weight: Codes, scales and bias.
        out_NO: Takes the outputs, float16 or float32.
        activation: f.

    Raises:
        InputError: The input does not fit the weight.
    """
    outputs, inputs = weight.codes.shape
    check_tensor("x", x_NI, (-1, inputs), torch.float16, torch.float32)
    rows, tile_i = len(x_NI), TILE_I if x_NI.dtype == torch.float16 else TILE_I // 4
    tile_n = TILE_N if rows <= TILE_N else LARGE_N
    arguments = {
        "x": x_NI, "codes": weight.codes, "scale": weight.scale, "bias": weight.bias, "out": out_NO,
        "rows": rows, "outputs": outputs, "inputs": inputs, "ACTIVATION": activation,
        "TILE_N": tile_n, "TILE_O": TILE_O, "TILE_I": tile_i, "EVEN": inputs % tile_i == 0,
    }  # fmt: skip
    num_bytes = bytes_of(x_NI, weight.codes, weight.scale, weight.bias, out_NO)
    cost = Cost(num_bytes, 2 * rows * outputs * inputs, unit_of(x_NI))
    return Launch(w8a16_gemm_kernel, (cdiv(rows, tile_n), cdiv(outputs, TILE_O)), arguments, cost, 4, 4)


@triton.jit
def w8a16_gemm_kernel(
    x: tl.pointer_type, codes: tl.pointer_type, scale: tl.pointer_type, bias: tl.pointer_type, out: tl.pointer_type,
    rows: tl.tensor, outputs: tl.tensor, inputs: tl.tensor, ACTIVATION: tl.constexpr,
    TILE_N: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, one tile of the output."""
    tile_n, tile_o = tl.program_id(0), tl.program_id(1)
    if DEPENDENT:
        prefetch_rows(codes, tile_o * TILE_O, outputs, inputs, TILE_O)
    wait_for_inputs(DEPENDENT)
    n, o, i = tl.arange(0, TILE_N), tl.arange(0, TILE_O), tl.arange(0, TILE_I)
    # Past the end the last row is read again, which needs no mask; the copies are not stored.
    inside_n, inside_o = tl.minimum(n, rows - 1 - tile_n * TILE_N), tl.minimum(o, outputs - 1 - tile_o * TILE_O)
    first_o = tile_o.to(tl.int64) * TILE_O
    x_at = x + tile_n.to(tl.int64) * TILE_N * inputs + (inside_n[:, None] * inputs + i[None, :])
    codes_at = codes + first_o * inputs + (inside_o[None, :] * inputs + i[:, None])
    sums = tl.zeros((TILE_N, TILE_O), tl.float32)
    for start in range(0, inputs, TILE_I):
        if EVEN:
            x_tile, weight = tl.load(x_at), tl.load(codes_at)
        else:
            x_tile = tl.load(x_at, i[None, :] < inputs - start, other=0.0)
            weight = tl.load(codes_at, i[:, None] < inputs - start, other=0)
        sums = tl.dot(x_tile, weight.to(x_tile.dtype), sums, input_precision="ieee")
        x_at += TILE_I
        codes_at += TILE_I
    row, column = tile_n * TILE_N + n, tile_o * TILE_O + o
    y = sums * tl.load(scale + column, column < outputs, other=1.0)[None, :]
    if bias is not None:
        y += tl.load(bias + column, column < outputs, other=0.0)[None, :]
    at = tile_n.to(tl.int64) * TILE_N * outputs + first_o + (n[:, None] * outputs + o[None, :])
    tl.store(out + at, activated(y, ACTIVATION).to(out.dtype.element_ty), (row < rows)[:, None] & (column < outputs)[None, :])
