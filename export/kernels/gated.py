"""int8 GEMM of a gated feed-forward network: both products of one input, the gate's activation, their product, and requantize.

    g = float32(q_x @ q_g.T) * scales + b_g,   u = float32(q_x @ q_u.T) * scales + b_u     as in `epilogue`, sums exact
    z = f(g) u                                                            Shazeer 2020, https://arxiv.org/abs/2002.05202
    then z rounded to the output type, or requantized: clamp(rint(z / s_out), -128, 127)

A program reads a tile of the input once and multiplies it by the same outputs of gate and up, so that both meet in registers.

Bounds: those of `epilogue` and `activation_codes` on f(g), times |u|: floats within 2^-20 |g u|, codes equal the codes of the exact
z / s_out unless it lies within 2^-20 |g u| / s_out + 2^-16 of a tie.

Shape suffixes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from export.kernels.activation_codes import activated, share_logistic
from export.kernels.dependent_launch import prefetch_rows, wait_for_inputs
from export.kernels.epilogue import Int8Weight, Output, rescaled
from export.kernels.gemm import STRIP, Tile, tile_at
from export.kernels.launch import Cost, Launch, bytes_of, cdiv
from export.kernels.rounding import int8_codes
from foundation.core.errors import InputError

TILES = (Tile(16, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3), Tile(128, 64, 128, 8, 3))
"""For up to 16 rows, up to 64 rows, and more: half the outputs of `gemm`, as there are two sums for each."""


def launch(x_NI: Tensor, scale: float | Tensor, gate: Int8Weight, up: Int8Weight, output: Output, out_NO: Tensor) -> Launch:
    """Returns the launch of both products.

    Args:
        x_NI: Codes of the input, int8 `[N, I]`, contiguous; I below 2^17, so that int32 holds the sums.
        scale: Scale of the input: one number, or float32 `[N, 1]`.
        gate: Codes, scales and bias of the product that goes through the activation.
        up: The same of the other one, of the same shape, with a bias if the gate has one.
        output: Activation, type and scale of the output; its method is `fitted`.
        out_NO: Takes the outputs, in the type of `output`.

    Raises:
        InputError: Gate and up have other shapes, or one of them alone has a bias.
    """
    (rows, inputs), outputs, scales_N = x_NI.shape, gate.codes.shape[0], scale if isinstance(scale, Tensor) else None
    if gate.codes.shape != up.codes.shape or (gate.bias is None) != (up.bias is None):
        shapes = [f"{list(one.codes.shape)}{'' if one.bias is None else ' with a bias'}" for one in (gate, up)]
        raise InputError("gate, up", f"{shapes[0]} and {shapes[1]} given", "both have one shape, and both or none have a bias")
    tile = next((tile for tile in TILES if rows <= tile.rows), TILES[-1])
    arguments = {
        "x": x_NI, "x_scale": scales_N, "input_scale": 1.0 if isinstance(scale, Tensor) else scale,
        "gate": gate.codes, "gate_scale": gate.scale, "gate_bias": gate.bias, "up": up.codes, "up_scale": up.scale, "up_bias": up.bias,
        "out": out_NO, "out_scale": 1.0 if output.scale is None else output.scale,
        "rows": rows, "outputs": outputs, "inputs": inputs, "ACTIVATION": output.activation,
        "TILE_N": tile.rows, "TILE_O": tile.outputs, "TILE_I": tile.inputs, "EVEN": inputs % tile.inputs == 0, "STRIP": STRIP,
    }  # fmt: skip
    weights = bytes_of(gate.codes, gate.scale, gate.bias, up.codes, up.scale, up.bias)
    cost = Cost(bytes_of(x_NI, scales_N, out_NO) + weights, 4 * rows * outputs * inputs, "int8")
    grid = (cdiv(rows, tile.rows) * cdiv(outputs, tile.outputs),)
    return Launch(int8_gated_kernel, grid, arguments, cost, tile.num_warps, tile.num_stages)


@triton.jit
def int8_gated_kernel(
    x: tl.pointer_type, x_scale: tl.pointer_type, input_scale: tl.tensor,
    gate: tl.pointer_type, gate_scale: tl.pointer_type, gate_bias: tl.pointer_type,
    up: tl.pointer_type, up_scale: tl.pointer_type, up_bias: tl.pointer_type, out: tl.pointer_type, out_scale: tl.tensor,
    rows: tl.tensor, outputs: tl.tensor, inputs: tl.tensor, ACTIVATION: tl.constexpr,
    TILE_N: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr, EVEN: tl.constexpr, STRIP: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, one tile of the output."""
    tile_n, tile_o = tile_at(tl.program_id(0), rows, outputs, TILE_N, TILE_O, STRIP)
    if DEPENDENT:
        prefetch_rows(gate, tile_o * TILE_O, outputs, inputs, TILE_O)
        prefetch_rows(up, tile_o * TILE_O, outputs, inputs, TILE_O)
    wait_for_inputs(DEPENDENT)
    n, o, i = tl.arange(0, TILE_N), tl.arange(0, TILE_O), tl.arange(0, TILE_I)
    # Past the end the last row is read again, which needs no mask; the copies are not stored.
    inside_n, inside_o = tl.minimum(n, rows - 1 - tile_n * TILE_N), tl.minimum(o, outputs - 1 - tile_o * TILE_O)
    x_at = x + tile_n.to(tl.int64) * TILE_N * inputs + (inside_n[:, None] * inputs + i[None, :])
    at = tile_o.to(tl.int64) * TILE_O * inputs + (inside_o[None, :] * inputs + i[:, None])
    gate_at, up_at = gate + at, up + at
    gates, ups = tl.zeros((TILE_N, TILE_O), tl.int32), tl.zeros((TILE_N, TILE_O), tl.int32)
    for start in range(0, inputs, TILE_I):
        left = inputs - start
        x_tile = tl.load(x_at) if EVEN else tl.load(x_at, i[None, :] < left, other=0)
        gate_tile = tl.load(gate_at) if EVEN else tl.load(gate_at, i[:, None] < left, other=0)
        up_tile = tl.load(up_at) if EVEN else tl.load(up_at, i[:, None] < left, other=0)
        gates = tl.dot(x_tile, gate_tile, gates, out_dtype=tl.int32)
        ups = tl.dot(x_tile, up_tile, ups, out_dtype=tl.int32)
        x_at += TILE_I
        gate_at += TILE_I
        up_at += TILE_I
    row, column = tile_n * TILE_N + n, tile_o * TILE_O + o
    g = rescaled(gates, row, column, rows, outputs, x_scale, input_scale, gate_scale, gate_bias)
    u = rescaled(ups, row, column, rows, outputs, x_scale, input_scale, up_scale, up_bias)
    to = out + tile_n.to(tl.int64) * TILE_N * outputs + tile_o.to(tl.int64) * TILE_O + (n[:, None] * outputs + o[None, :])
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    if out.dtype.element_ty == tl.int8:
        if ACTIVATION == "none" or ACTIVATION == "relu":
            z = activated(g, ACTIVATION) * u
        else:
            z = g * share_logistic(g, ACTIVATION, "fitted") * u
        tl.store(to, int8_codes(z, out_scale, -128), inside)
    else:
        tl.store(to, (activated(g, ACTIVATION) * u).to(out.dtype.element_ty), inside)
