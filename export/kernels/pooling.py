"""Pooling of packed rows: one vector for each sequence, the mean of the states of its tokens, with equal or with growing weights.

    mean        v = sum_t h_t / L
    weighted    v = sum_t t h_t / sum_t t        t = 1 .. L

A program adds up some columns of one sequence, tile of tokens after tile. Tiles begin at the first token of the sequence, so that a vector
has the same bits whatever is packed next to it. A sequence without tokens has zeros.

Bound against float64, with u = 2^-24 and M the largest |h| of the sequence in a column:

    |v - exact| <= (ceil(L / 32) + 36) u M

for the sums of a tile's row over the tiles, of its 32 rows, the weights' product and sum, and the quotient.

Left out: the largest element (max pooling).

Shape suffixes: T tokens, I columns, B sequences.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from export.kernels.dependent_launch import wait_for_inputs
from export.kernels.launch import Cost, Launch, bytes_of, cdiv

Weights = Literal["mean", "weighted"]
TILE_T, TILE_I = 32, 64


def launch(x_TI: Tensor, start_B: Tensor, weights: Weights, out_BI: Tensor) -> Launch:
    """Returns the launch of a pooling.

    Args:
        x_TI: States, float32, float16 or bfloat16 `[T, I]`, contiguous.
        start_B: int32 `[B + 1]`: sequence b has the rows start[b] to start[b + 1] - 1; fewer than 65536.
        weights: Equal ones, or 1, 2, 3, ...
        out_BI: Takes the vectors, float32 `[B, I]`.
    """
    (tokens, inputs), sequences = x_TI.shape, out_BI.shape[0]
    arguments = {
        "x": x_TI, "start": start_B, "out": out_BI, "inputs": inputs,
        "WEIGHTED": weights == "weighted", "TILE_T": TILE_T, "TILE_I": TILE_I,
    }  # fmt: skip
    cost = Cost(bytes_of(x_TI, start_B, out_BI), 2 * tokens * inputs, "fp32")
    return Launch(pool_kernel, (sequences, cdiv(inputs, TILE_I)), arguments, cost)


@triton.jit
def pool_kernel(
    x: tl.pointer_type, start: tl.pointer_type, out: tl.pointer_type, inputs: tl.tensor,
    WEIGHTED: tl.constexpr, TILE_T: tl.constexpr, TILE_I: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, some columns of one sequence."""
    wait_for_inputs(DEPENDENT)
    sequence, tile = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(start + sequence), tl.load(start + sequence + 1)
    length = end - first
    t, i = tl.arange(0, TILE_T), tile * TILE_I + tl.arange(0, TILE_I)
    x_at = x + first.to(tl.int64) * inputs + (t[:, None] * inputs + i[None, :])
    sums = tl.zeros((TILE_T, TILE_I), tl.float32)
    for begin in range(0, length, TILE_T):
        h = tl.load(x_at, (begin + t < length)[:, None] & (i < inputs)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            h = h * (begin + t + 1).to(tl.float32)[:, None]
        sums += h
        x_at += TILE_T * inputs
    total = length.to(tl.float32)
    if WEIGHTED:
        total = total * (total + 1.0) * 0.5
    v = tl.div_rn(tl.sum(sums, 0), tl.zeros((TILE_I,), tl.float32) + tl.maximum(total, 1.0))
    tl.store(out + sequence.to(tl.int64) * inputs + i, v, i < inputs)
