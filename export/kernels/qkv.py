"""int8 projection to queries, keys and values in one GEMM, split by head, with rotary positions (RoPE).

    y = float32(q_x @ q_w.T) * scales + b                     as in `epilogue`, sums exact
    for a head of queries or keys with halves y1, y2          Su et al. 2021, https://arxiv.org/abs/2104.09864
        z1 = y1 cos - y2 sin,   z2 = y2 cos + y1 sin          cos and sin [N, D / 2], as Transformers' Llama pairs halves
    queries and keys are stored as float16 or float32, or as codes clamp(rint(z / s), -128, 127) for `attention`; values in that float type

The weights of queries, keys and values are stacked: H D, K D and K D outputs. One program computes one head of some rows, as two
tiles of D / 2 outputs, so that the halves meet in registers. Without cos and sin the heads are only split. Tiles have a power of two of
outputs: where D / 2 is none, the last output is computed again and not stored.

Keys and values may go to rows of their own, such as the slots of a cache of pages (`paged_attention`): row n of both to row slots[n].

Bound: equal to the torch reference in every bit, as no product is fused with an addition.

Left out: odd dimensions of a head, and above 256; rotation of a part of a head.

Shape suffixes: N rows, I inputs, O outputs, H heads of queries, K heads of keys and values, D dimension of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.dependent_launch import prefetch_rows, wait_for_inputs
from export.kernels.epilogue import Int8Weight, rescaled, stored
from export.kernels.launch import Cost, Launch, bytes_of, cdiv, check_step, power_of_two
from foundation.core.errors import InputError

DIMENSIONS = range(2, 257, 2)
"""Dimensions of a head."""
FEWEST_OUTPUTS = 16
"""Outputs of a tile, at least: what the matrix instruction takes."""


@dataclass(frozen=True)
class Heads:
    """How outputs are split into heads, and how queries and keys are stored.

    Raises:
        InputError: The dimension is not allowed, or no codes can have a scale.
    """

    queries: int
    """H."""
    keys: int
    """K."""
    dimension: int
    """D."""
    query_scale: float | None = None
    """Quantizes queries with this scale; None for float16."""
    key_scale: float | None = None
    """Quantizes keys with this scale; None for float16."""
    dtype: torch.dtype = torch.float16
    """float16 or float32: what is not quantized."""

    def __post_init__(self) -> None:
        if self.dimension not in DIMENSIONS:
            raise InputError(
                "dimension", f"{self.dimension} given", f"an even number from {DIMENSIONS[0]} to {DIMENSIONS[-1]} is allowed for a head"
            )
        if self.queries < 1 or self.keys < 1:
            raise InputError("queries, keys", f"{self.queries} and {self.keys} heads given", "at least one of both is needed")
        if self.dtype not in (torch.float16, torch.float32):
            raise InputError("dtype", f"{self.dtype} given", "queries, keys and values are float16 or float32")
        for name, scale in {"query scale": self.query_scale, "key scale": self.key_scale}.items():
            if scale is not None:
                check_step(name, scale)

    @property
    def outputs(self) -> int:
        """O = (H + 2 K) D."""
        return (self.queries + 2 * self.keys) * self.dimension

    def types(self) -> list[tuple[int, torch.dtype]]:
        """Returns number of heads and stored type of queries, keys and values."""
        stored_as = [self.dtype if scale is None else torch.int8 for scale in (self.query_scale, self.key_scale)]
        return [(self.queries, stored_as[0]), (self.keys, stored_as[1]), (self.keys, self.dtype)]


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of every row."""

    cos: Tensor
    """float32 [N, D / 2]."""
    sin: Tensor
    """float32 [N, D / 2]."""


def launch(
    x_NI: Tensor, scale: float | Tensor, weight: Int8Weight, heads: Heads, rotary: Rotary | None, qkv: tuple[Tensor, Tensor, Tensor],
    slots_N: Tensor | None = None,
) -> Launch:  # fmt: skip
    """Returns the launch of a projection.

    Args:
        x_NI: Codes of the input, int8 `[N, I]`, contiguous; I below 2^17.
        scale: Scale of the input: one number, or float32 `[N, 1]`.
        weight: Codes `[(H + 2 K) D, I]`, scales and bias.
        heads: Heads, and scales of queries and keys.
        rotary: Cosines and sines, or None.
        qkv: Takes queries `[N, H, D]`, keys and values `[N, K, D]`; with slots keys and values `[S, K, D]`.
        slots_N: Row of keys and values that each row goes to, int64 `[N]`, from 0 to S - 1; None: its own.
    """
    (rows, inputs), scales_N = x_NI.shape, scale if isinstance(scale, Tensor) else None
    tile_n, half = 16 if rows <= 16 else 64, heads.dimension // 2
    arguments = {
        "x": x_NI, "x_scale": scales_N, "input_scale": 1.0 if isinstance(scale, Tensor) else scale,
        "weight": weight.codes, "weight_scale": weight.scale, "bias": weight.bias,
        "cos": None if rotary is None else rotary.cos, "sin": None if rotary is None else rotary.sin,
        "q": qkv[0], "k": qkv[1], "v": qkv[2], "slots": slots_N,
        "query_scale": 1.0 if heads.query_scale is None else heads.query_scale,
        "key_scale": 1.0 if heads.key_scale is None else heads.key_scale,
        "rows": rows, "inputs": inputs, "query_heads": heads.queries, "key_heads": heads.keys,
        "HALF": half, "TILE_O": max(FEWEST_OUTPUTS, power_of_two(half)), "TILE_N": tile_n, "TILE_I": 128, "EVEN": inputs % 128 == 0,
    }  # fmt: skip
    angles = () if rotary is None else (rotary.cos, rotary.sin)
    stored_bytes = bytes_of(qkv[0]) + sum(rows * part[0].numel() * part.element_size() for part in qkv[1:])
    num_bytes = bytes_of(x_NI, scales_N, weight.codes, weight.scale, weight.bias, *angles, slots_N) + stored_bytes
    grid = (cdiv(rows, tile_n), heads.queries + 2 * heads.keys)
    return Launch(int8_qkv_kernel, grid, arguments, Cost(num_bytes, 2 * rows * heads.outputs * inputs, "int8"), 4, 3)


@triton.jit
def stored_pair(
    z1: tl.tensor, z2: tl.tensor, out: tl.pointer_type, head: tl.tensor, heads: tl.tensor, row: tl.tensor, inside: tl.tensor,
    scale: tl.tensor, HALF: tl.constexpr, TILE_O: tl.constexpr,
) -> None:  # fmt: skip
    """Stores the two halves of a head, in some rows of `out` [rows, heads, 2 HALF]."""
    h = tl.arange(0, TILE_O)
    at = (row.to(tl.int64)[:, None] * heads + head) * (2 * HALF) + h[None, :]
    stays = inside[:, None] if HALF == TILE_O else inside[:, None] & (h < HALF)[None, :]
    stored(z1, out, at, stays, scale)
    stored(z2, out, at + HALF, stays, scale)


@triton.jit
def int8_qkv_kernel(
    x: tl.pointer_type, x_scale: tl.pointer_type, input_scale: tl.tensor,
    weight: tl.pointer_type, weight_scale: tl.pointer_type, bias: tl.pointer_type, cos: tl.pointer_type, sin: tl.pointer_type,
    q: tl.pointer_type, k: tl.pointer_type, v: tl.pointer_type, slots: tl.pointer_type, query_scale: tl.tensor, key_scale: tl.tensor,
    rows: tl.tensor, inputs: tl.tensor, query_heads: tl.tensor, key_heads: tl.tensor,
    HALF: tl.constexpr, TILE_O: tl.constexpr, TILE_N: tl.constexpr, TILE_I: tl.constexpr, EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, some rows of one head."""
    tile_n, head = tl.program_id(0), tl.program_id(1)
    if DEPENDENT:
        prefetch_rows(weight, head * (2 * HALF), (query_heads + 2 * key_heads) * (2 * HALF), inputs, 2 * TILE_O)
    wait_for_inputs(DEPENDENT)
    n, i = tl.arange(0, TILE_N), tl.arange(0, TILE_I)
    h = tl.arange(0, TILE_O) if HALF == TILE_O else tl.minimum(tl.arange(0, TILE_O), HALF - 1)
    inside_n = tl.minimum(n, rows - 1 - tile_n * TILE_N)  # past the end the last row is read again and not stored
    x_at = x + tile_n.to(tl.int64) * TILE_N * inputs + (inside_n[:, None] * inputs + i[None, :])
    weight_at = weight + head.to(tl.int64) * (2 * HALF) * inputs + (h[None, :] * inputs + i[:, None])
    sums1, sums2 = tl.zeros((TILE_N, TILE_O), tl.int32), tl.zeros((TILE_N, TILE_O), tl.int32)
    for start in range(0, inputs, TILE_I):
        left = inputs - start
        x_tile = tl.load(x_at) if EVEN else tl.load(x_at, i[None, :] < left, other=0)
        weight1 = tl.load(weight_at) if EVEN else tl.load(weight_at, i[:, None] < left, other=0)
        weight2 = tl.load(weight_at + HALF * inputs) if EVEN else tl.load(weight_at + HALF * inputs, i[:, None] < left, other=0)
        sums1 = tl.dot(x_tile, weight1, sums1, out_dtype=tl.int32)
        sums2 = tl.dot(x_tile, weight2, sums2, out_dtype=tl.int32)
        x_at += TILE_I
        weight_at += TILE_I
    row, column = tile_n * TILE_N + n, head * (2 * HALF) + h
    inside, outputs = row < rows, (query_heads + 2 * key_heads) * (2 * HALF)
    y1 = rescaled(sums1, row, column, rows, outputs, x_scale, input_scale, weight_scale, bias)
    y2 = rescaled(sums2, row, column + HALF, rows, outputs, x_scale, input_scale, weight_scale, bias)
    to = row if slots is None else tl.load(slots + row, inside, other=0)
    if head >= query_heads + key_heads:
        stored_pair(y1, y2, v, head - query_heads - key_heads, key_heads, to, inside, 1.0, HALF, TILE_O)
    else:
        z1, z2 = y1, y2
        if cos is not None:
            angle_at = row.to(tl.int64)[:, None] * HALF + h[None, :]
            c = tl.load(cos + angle_at, inside[:, None], other=0.0)
            s = tl.load(sin + angle_at, inside[:, None], other=0.0)
            z1, z2 = y1 * c - y2 * s, y2 * c + y1 * s
        if head < query_heads:
            stored_pair(z1, z2, q, head, query_heads, row, inside, query_scale, HALF, TILE_O)
        else:
            stored_pair(z1, z2, k, head - query_heads, key_heads, to, inside, key_scale, HALF, TILE_O)
