"""int8 GEMM with everything that follows it: dequantize per channel, bias, GELU or SiLU, and requantize.

    z = epilogue(q_x @ q_w.T)      sums in int32, exact; see `epilogue`

The sums are in no particular order, which integers do not notice. Programs are numbered in strips of 8 tiles of rows, so that programs at
work together share tiles of the weight in cache.

Persistent programs: the loop over tiles and the loop over inputs are one (`flatten`), so that its pipeline of copies runs on into the next
tile. Warps are not specialized: release 3.9 makes the same code for capability 90 whether it is asked to or not.

For capabilities 80 to 89, release 3.9 of the language carries prefetched operands through the loop byte by byte (3.7 does not): 264 PRMT
and LOP3 an iteration, however many inputs a tile has. With 128 inputs the 64 matrix instructions of a tile still take longer on an A100.

Input sizes that are not a multiple of 16 are correct and slow: they are copied byte by byte. Left out: splitting a long I over programs.

Shape suffixes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.dependent_launch import prefetch_rows, wait_for_inputs
from export.kernels.epilogue import Int8Weight, Output, finished, rescaled
from export.kernels.launch import Cost, Launch, bytes_of, cdiv

STRIP = 8
PROGRAMS_ELSEWHERE = 3
"""Persistent programs of the interpreter, so that each has several tiles."""


@dataclass(frozen=True)
class Tile:
    """What one program computes: rows x outputs, so many inputs at a time."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    two_passes: bool = False
    """Whether the outputs are ended one half after the other: half as many weight scales and biases wait in registers."""
    persistent: bool = False
    """Whether as many programs as fit go from tile to tile; the copies of the next one begin while this one is ended."""


TILES = (Tile(16, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3), Tile(128, 128, 128, 8, 3))
"""For up to 16 rows, up to 64 rows, and more."""


def tile_of(rows: int) -> Tile:
    """Returns the tile for a number of rows."""
    return next((tile for tile in TILES if rows <= tile.rows), TILES[-1])


def launch(x_NI: Tensor, scale: float | Tensor, weight: Int8Weight, output: Output, out_NO: Tensor, tile: Tile | None = None) -> Launch:
    """Returns the launch of an int8 linear layer. No tile changes a bit of the outputs.

    Args:
        x_NI: Codes of the input, int8 `[N, I]`, contiguous; I below 2^17, so that int32 holds the sums.
        scale: Scale of the input: one number, or float32 `[N, 1]`.
        weight: Codes, scales and bias.
        output: Activation, type and scale of the output.
        out_NO: Takes the outputs, in the type of `output`.
        tile: What one program computes; None: `tile_of` the rows.
    """
    (rows, inputs), outputs = x_NI.shape, weight.codes.shape[0]
    tile, scales_N = tile or tile_of(rows), scale if isinstance(scale, Tensor) else None
    arguments = {
        "x": x_NI, "x_scale": scales_N, "input_scale": 1.0 if isinstance(scale, Tensor) else scale,
        "weight": weight.codes, "weight_scale": weight.scale, "bias": weight.bias,
        "out": out_NO, "out_scale": 1.0 if output.scale is None else output.scale,
        "rows": rows, "outputs": outputs, "inputs": inputs, "ACTIVATION": output.activation, "METHOD": output.method,
        "TILE_N": tile.rows, "TILE_O": tile.outputs, "TILE_I": tile.inputs, "EVEN": inputs % tile.inputs == 0,
        "STRIP": STRIP, "HALVES": tile.two_passes, "PERSISTENT": tile.persistent,
    }  # fmt: skip
    num_bytes = bytes_of(x_NI, scales_N, weight.codes, weight.scale, weight.bias, out_NO)
    tiles = cdiv(rows, tile.rows) * cdiv(outputs, tile.outputs)
    grid = (min(tiles, programs(x_NI.device, tile)) if tile.persistent else tiles,)
    return Launch(int8_gemm_kernel, grid, arguments, Cost(num_bytes, 2 * rows * outputs * inputs, "int8"), tile.num_warps, tile.num_stages)


def programs(device: torch.device, tile: Tile) -> int:
    """Returns the programs that a GPU runs at once: by their registers one of 8 warps for each multiprocessor, two where they end in
    halves, and four of 4 warps; elsewhere few."""
    if device.type != "cuda":
        return PROGRAMS_ELSEWHERE
    together = 4 if tile.num_warps <= 4 else 2 if tile.two_passes else 1
    return torch.cuda.get_device_properties(device).multi_processor_count * together


@triton.jit
def tile_at(
    number: tl.tensor, rows: tl.tensor, outputs: tl.tensor, TILE_N: tl.constexpr, TILE_O: tl.constexpr, STRIP: tl.constexpr
) -> tl.tensor:
    """Returns the tile of rows and the tile of outputs of a number: all outputs of a strip of rows before the next strip."""
    row_tiles, output_tiles = tl.cdiv(rows, TILE_N), tl.cdiv(outputs, TILE_O)
    strip = number // (STRIP * output_tiles)
    height = tl.minimum(row_tiles - strip * STRIP, STRIP)
    within = number % (STRIP * output_tiles)
    return strip * STRIP + within % height, within // height


@triton.jit
def int8_gemm_kernel(
    x: tl.pointer_type, x_scale: tl.pointer_type, input_scale: tl.tensor,
    weight: tl.pointer_type, weight_scale: tl.pointer_type, bias: tl.pointer_type,
    out: tl.pointer_type, out_scale: tl.tensor,
    rows: tl.tensor, outputs: tl.tensor, inputs: tl.tensor, ACTIVATION: tl.constexpr, METHOD: tl.constexpr,
    TILE_N: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr, EVEN: tl.constexpr, STRIP: tl.constexpr, HALVES: tl.constexpr,
    PERSISTENT: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, one tile of the output, or one after another."""
    if DEPENDENT:
        _, first_o = tile_at(tl.program_id(0), rows, outputs, TILE_N, TILE_O, STRIP)
        prefetch_rows(weight, first_o * TILE_O, outputs, inputs, TILE_O)
    wait_for_inputs(DEPENDENT)
    if PERSISTENT:
        tiles = tl.cdiv(rows, TILE_N) * tl.cdiv(outputs, TILE_O)
        for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            tile_n, tile_o = tile_at(number, rows, outputs, TILE_N, TILE_O, STRIP)
            sums = products(x, weight, tile_n, tile_o, rows, outputs, inputs, TILE_N, TILE_O, TILE_I, EVEN)
            ended(sums, tile_n, tile_o, x_scale, input_scale, weight_scale, bias, out, out_scale, rows, outputs, ACTIVATION, METHOD,
                  TILE_N, TILE_O, HALVES)  # fmt: skip
    else:
        tile_n, tile_o = tile_at(tl.program_id(0), rows, outputs, TILE_N, TILE_O, STRIP)
        sums = products(x, weight, tile_n, tile_o, rows, outputs, inputs, TILE_N, TILE_O, TILE_I, EVEN)
        ended(sums, tile_n, tile_o, x_scale, input_scale, weight_scale, bias, out, out_scale, rows, outputs, ACTIVATION, METHOD,
              TILE_N, TILE_O, HALVES)  # fmt: skip


@triton.jit
def products(
    x: tl.pointer_type, weight: tl.pointer_type, tile_n: tl.tensor, tile_o: tl.tensor,
    rows: tl.tensor, outputs: tl.tensor, inputs: tl.tensor,
    TILE_N: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr, EVEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns the sums of a tile, int32 [TILE_N, TILE_O]."""
    n, o, i = tl.arange(0, TILE_N), tl.arange(0, TILE_O), tl.arange(0, TILE_I)
    # Past the end the last row is read again, which needs no mask; the copies are not stored.
    inside_n, inside_o = tl.minimum(n, rows - 1 - tile_n * TILE_N), tl.minimum(o, outputs - 1 - tile_o * TILE_O)
    x_at = x + tile_n.to(tl.int64) * TILE_N * inputs + (inside_n[:, None] * inputs + i[None, :])
    weight_at = weight + tile_o.to(tl.int64) * TILE_O * inputs + (inside_o[None, :] * inputs + i[:, None])
    sums = tl.zeros((TILE_N, TILE_O), tl.int32)
    for start in range(0, inputs, TILE_I):
        if EVEN:
            sums = tl.dot(tl.load(x_at), tl.load(weight_at), sums, out_dtype=tl.int32)
        else:
            left = inputs - start
            x_tile, weight_tile = tl.load(x_at, i[None, :] < left, other=0), tl.load(weight_at, i[:, None] < left, other=0)
            sums = tl.dot(x_tile, weight_tile, sums, out_dtype=tl.int32)
        x_at += TILE_I
        weight_at += TILE_I
    return sums


@triton.jit
def ended(
    sums: tl.tensor, tile_n: tl.tensor, tile_o: tl.tensor, x_scale: tl.pointer_type, input_scale: tl.tensor,
    weight_scale: tl.pointer_type, bias: tl.pointer_type, out: tl.pointer_type, out_scale: tl.tensor, rows: tl.tensor, outputs: tl.tensor,
    ACTIVATION: tl.constexpr, METHOD: tl.constexpr, TILE_N: tl.constexpr, TILE_O: tl.constexpr, HALVES: tl.constexpr,
) -> None:  # fmt: skip
    """Stores the outputs of the sums of a tile."""
    n, o = tl.arange(0, TILE_N), tl.arange(0, TILE_O)
    row, column = tile_n * TILE_N + n, tile_o * TILE_O
    at = out + tile_n.to(tl.int64) * TILE_N * outputs + tile_o.to(tl.int64) * TILE_O
    if HALVES:
        half = tl.arange(0, TILE_O // 2)
        left, right = tl.split(tl.permute(tl.reshape(sums, (TILE_N, 2, TILE_O // 2)), (0, 2, 1)))
        y = rescaled(left, row, column + half, rows, outputs, x_scale, input_scale, weight_scale, bias)
        inside = (row < rows)[:, None] & (column + half < outputs)[None, :]
        finished(y, at, n[:, None] * outputs + half[None, :], inside, out_scale, ACTIVATION, METHOD)
        half += TILE_O // 2
        y = rescaled(right, row, column + half, rows, outputs, x_scale, input_scale, weight_scale, bias)
        inside = (row < rows)[:, None] & (column + half < outputs)[None, :]
        finished(y, at, n[:, None] * outputs + half[None, :], inside, out_scale, ACTIVATION, METHOD)
    else:
        y = rescaled(sums, row, column + o, rows, outputs, x_scale, input_scale, weight_scale, bias)
        inside = (row < rows)[:, None] & (column + o < outputs)[None, :]
        finished(y, at, n[:, None] * outputs + o[None, :], inside, out_scale, ACTIVATION, METHOD)
