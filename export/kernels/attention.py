"""Attention over packed rows: sequences of any lengths, one after another without padding. Online softmax, Dao et al. 2022.

    S = Q K^T * scaling,   P = softmax(S),   O = P V       within each sequence; causal: a row sees itself and the rows before it

https://arxiv.org/abs/2205.14135: a program holds a tile of queries and goes over the keys once; largest score m and sum l are carried on,
and what was added before is scaled when m grows:

    m' = max(m, max S),   p = 2^((S - m') log2 e),   l' = l 2^((m - m') log2 e) + sum p,   O' = O 2^((m - m') log2 e) + p V

The scaling and log2 e are one factor f of S, and m is the largest product before it: p = 2^(S f - m f) by one fused multiply-add and
one instruction (ex2.approx, which is good to 2^-22 and has no results below 2^-126). Only tiles at the end of a sequence, or across the
diagonal, are masked.

Any m gives the same quotient O / l, as long as both have the same one. So m may stay where it is until a score lies more than log2 256 = 8
powers of two above it (FlashAttention-4, https://github.com/Dao-AILab/flash-attention), with p at most 256, and l and O are not scaled in
that tile. A program decides for all its rows: its warps vote, which takes a reduction and on capability 9.0 a barrier in each tile.
Instructions of the loop in a tile without growth, for heads of 64 (`python -m benchmarks.gpu.rescaling`): 313 instead of 334 on sm_80, 312
instead of 333 on sm_89, 296 instead of 313 on sm_90; for heads of 128 453 instead of 491, 453 instead of 495 and 336 instead of 384. Codes
with heads of 128 spill then on sm_80 and sm_89. On sm_100, where O lies in tensor memory and is loaded all the same, it is 409 instead of
346. There, for such codes, and for float32, every tile scales.

Q and K are float16 or float32, or int8 codes with one scale each, as in `foundation.schemes.attention_products` (site qk): there
S = float32(q_Q @ q_K^T) * (s_Q s_K scaling), the sums exact. V and p are float16 or float32, sums float32; products of float32 are not
rounded to TF32. Several heads of queries may share a head of keys and values. The outputs have the type of V, or are codes
clamp(rint(o / s_out), -128, 127).

Bound against float64 for n keys, with u = 2^-24 and V the largest |v| of the sequence in this head and dimension:

    |o - exact| <= V (2 delta + 2^-10 + n u) + 2^-11 |exact| + u,    delta = 2 (D + 8) u max_j sum_d |q_d k_jd| scaling
                                                                     delta = 16 u max_j |s_j|                       for codes

from rounding scores, 2^x to 2^-22, p to float16 (p below 2^-24 becomes 0), and the output. With V in float32, p and the output are not
rounded, and 2^-20 stands for 2^-10, u for 2^-11.

A bias b of the head and the distance j - i of a key from its row may be added: S = Q K^T * scaling + b[h, j - i], as T5 and MPNet have it
(https://arxiv.org/abs/1910.10683, section 2.1). It is loaded for every score, and adds a product and a fused multiply-add; its rounding
adds 4 u max |b| to delta.

Left out: masks other than causal and the ends of sequences, probabilities in int8 (their scale needs the whole row), dimensions above 128,
scales per token.

Shape suffixes: T rows of all sequences, H heads of queries, K heads of keys and values, D dimension of a head, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.activation_codes import exp2_approximate
from export.kernels.dependent_launch import wait_for_inputs
from export.kernels.epilogue import stored
from export.kernels.launch import Cost, Launch, bytes_of, cdiv, check_scale, check_step, power_of_two

LOG2_E = math.log2(math.e)
BIAS_FACTOR = tl.constexpr(LOG2_E)
MOST_GROWN = tl.constexpr(8.0)
"""log2 of the largest p, by how much a score may exceed m before m is replaced; float16 holds p up to 2^16."""


@dataclass(frozen=True)
class Scores:
    """How scores are made of products."""

    scaling: float
    """Usually 1 / sqrt(D)."""
    causal: bool = False
    query_scale: float = 1.0
    """Scale of the codes of the queries; 1 for float16."""
    key_scale: float = 1.0
    """Scale of the codes of the keys; 1 for float16."""
    out_scale: float | None = None
    """Quantizes the outputs with this scale; None for the type of the values."""
    lazy: bool | None = None
    """Whether sums are scaled only in tiles where a largest score has grown by more than 8 powers of two; None: where that saves
    instructions. Other bits, within the same bound."""

    def __post_init__(self) -> None:
        scales = {
            "scaling": self.scaling,
            "query scale": self.query_scale,
            "key scale": self.key_scale,
        }
        for name, scale in scales.items():
            check_scale(name, scale)
        if self.out_scale is not None:
            check_step("scale of the output", self.out_scale)

    @property
    def factor(self) -> float:
        """Factor of the product."""
        return self.scaling * self.query_scale * self.key_scale


def launch(
    qkv: tuple[Tensor, Tensor, Tensor],
    start_B: Tensor,
    lengths: Sequence[int],
    scores: Scores,
    out_THD: Tensor,
    bias_HR: Tensor | None = None,
) -> Launch:
    """Returns the launch of attention; an int8 operation counts as half of one in float16.

    Args:
        qkv: Queries `[T, H, D]`, float16, float32 or int8 codes, with D from 1 to 128; keys `[T, K, D]`, of the same type; K divides H;
            values `[T, K, D]`, float16 or float32: the type of queries that are no codes.
        start_B: int32 `[B + 1]`: sequence b has the rows start[b] to start[b + 1] - 1; from 0 to T.
        lengths: Rows of each sequence.
        scores: Scaling, scales and causality.
        out_THD: Takes the outputs, in the type of the values, or int8 codes.
        bias_HR: float32 `[H, 2 N - 1]` for sequences of up to N rows: added to the scores of distance r - (N - 1); None for nothing.
    """
    q_THD, k_TKD, v_TKD = qkv
    (_, heads, dimension), longest = q_THD.shape, max(lengths)
    tile_q, tile_k, num_warps = (64, 64, 4) if longest <= 64 else (128, 64, 8)
    if v_TKD.dtype == torch.float32:  # twice the bytes, and no matrix instruction: the sums of a tile are in registers
        tile_q, tile_k, num_warps = 32, 32, float32_warps_at(capability_of(q_THD), dimension, out_THD.dtype)
    arguments = {
        "q": q_THD, "k": k_TKD, "v": v_TKD, "start": start_B, "out": out_THD, "bias": bias_HR,
        "farthest": 0 if bias_HR is None else bias_HR.shape[1] // 2, "factor": scores.factor * LOG2_E,
        "heads": heads, "key_heads": k_TKD.shape[1], "CAUSAL": scores.causal, "D": dimension, "BLOCK_D": max(32, power_of_two(dimension)),
        "out_scale": 1.0 if scores.out_scale is None else scores.out_scale, "SPLIT": v_TKD.dtype != torch.float32,
        "TILE_Q": tile_q, "TILE_K": tile_k, "LAZY": lazy_by_default(q_THD, v_TKD) if scores.lazy is None else scores.lazy,
    }  # fmt: skip
    pairs = sum(length * (length + 1) // 2 if scores.causal else length**2 for length in lengths)
    operations = 2 * pairs * heads * dimension * 2
    operations = operations * 3 // 4 if q_THD.dtype == torch.int8 else operations
    cost = Cost(bytes_of(*qkv, start_B, out_THD, bias_HR), operations, "fp32" if v_TKD.dtype == torch.float32 else "fp16")
    return Launch(packed_attention_kernel, (cdiv(longest, tile_q), heads, len(lengths)), arguments, cost, num_warps, 2)


def capability_of(tensor: Tensor) -> tuple[int, int]:
    """Returns the compute capability of the GPU of a tensor; tensors that are on no GPU count as 9.0."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (9, 0)


def float32_warps_at(capability: tuple[int, int], dimension: int, stored: torch.dtype) -> int:
    """Returns the warps of a program without matrix instructions: 4 spill 7 registers for heads of 128 on sm_80, and 12 on sm_120 where
    the outputs are codes."""
    return 8 if dimension > 64 or (stored == torch.int8 and capability >= (12, 0)) else 4


def lazy_by_default(q_THD: Tensor, v_TKD: Tensor) -> bool:
    """Whether `Scores.lazy` saves instructions, and spills nothing."""
    return lazy_at(capability_of(q_THD), q_THD, v_TKD)


def lazy_at(capability: tuple[int, int], q_THD: Tensor, v_TKD: Tensor) -> bool:
    """Whether `Scores.lazy` saves instructions, and spills nothing, on a GPU of a compute capability."""
    spills = q_THD.dtype == torch.int8 and q_THD.shape[2] > 64 and capability < (9, 0)
    return v_TKD.dtype != torch.float32 and capability < (10, 0) and not spills


@triton.jit
def packed_attention_kernel(
    q: tl.pointer_type, k: tl.pointer_type, v: tl.pointer_type, start: tl.pointer_type, out: tl.pointer_type, bias: tl.pointer_type,
    farthest: tl.tensor, factor: tl.tensor, out_scale: tl.tensor, heads: tl.tensor, key_heads: tl.tensor, CAUSAL: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, LAZY: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, a tile of queries of one head of one sequence."""
    wait_for_inputs(DEPENDENT)
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(start + sequence), tl.load(start + sequence + 1)
    length = end - first
    if tile * TILE_Q >= length:
        return
    key_head = head // (heads // key_heads)
    d, row, column = tl.arange(0, BLOCK_D), tile * TILE_Q + tl.arange(0, TILE_Q), tl.arange(0, TILE_K)
    at = first.to(tl.int64) * heads * D + head * D + (row[:, None] * heads * D + d[None, :])
    stays = (row < length)[:, None] & (d < D)[None, :]
    queries = tl.load(q + at, stays, other=0)
    first_key = first.to(tl.int64) * key_heads * D + key_head * D
    largest, total = tl.full((TILE_Q,), -float("inf"), tl.float32), tl.zeros((TILE_Q,), tl.float32)
    sums = tl.zeros((TILE_Q, BLOCK_D), tl.float32)
    unit = factor if bias is None else factor * 0.0 + 1.0  # scores with a bias have been multiplied
    # Tiles of keys that every row sees whole need no mask: before the last one, and before the first row where rows see no later ones.
    # Products of float32, without matrix instructions, fill the registers already: one loop.
    whole = 0
    if SPLIT:
        whole = (tl.minimum(length, tile * TILE_Q) if CAUSAL else length) // TILE_K * TILE_K
        for begin in range(0, whole, TILE_K):
            keys, values = tiles_of_keys(k, v, first_key, key_heads, begin + column, length, d, D, False)
            scores = scores_of(queries, keys)
            if bias is not None:
                scores = biased(scores, bias, head, farthest, row, begin + column, factor)
            largest, total, sums = added(scores, values, largest, total, sums, unit, LAZY)
    for begin in range(whole, tl.minimum(length, (tile + 1) * TILE_Q) if CAUSAL else length, TILE_K):
        key = begin + column
        keys, values = tiles_of_keys(k, v, first_key, key_heads, key, length, d, D, True)
        seen = (key < length)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= row[:, None])
        scores = scores_of(queries, keys)
        if bias is not None:
            scores = biased(scores, bias, head, farthest, row, key, factor)
        scores = tl.where(seen, scores, -float("inf"))  # key 0 is seen by every row
        largest, total, sums = added(scores, values, largest, total, sums, unit, LAZY)
    stored(sums * tl.div_rn(1.0, total)[:, None], out, at, stays, out_scale)


@triton.jit
def tiles_of_keys(
    k: tl.pointer_type, v: tl.pointer_type, first_key: tl.tensor, key_heads: tl.tensor, key: tl.tensor, length: tl.tensor, d: tl.tensor,
    D: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns a tile of keys [BLOCK_D, TILE_K] and of values [TILE_K, BLOCK_D], with zeros past D and past the sequence."""
    key_at, value_at = key[None, :] * key_heads * D + d[:, None], key[:, None] * key_heads * D + d[None, :]
    inside = (d < D)[:, None], (d < D)[None, :]
    if MASKED:
        inside = inside[0] & (key < length)[None, :], inside[1] & (key < length)[:, None]
    return tl.load(k + first_key + key_at, inside[0], other=0), tl.load(v + first_key + value_at, inside[1], other=0.0)


@triton.jit
def scores_of(queries: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Returns the products of queries and keys, float32 [TILE_Q, TILE_K]; products of codes are exact."""
    if queries.dtype == tl.int8:
        scores = tl.dot(queries, keys, out_dtype=tl.int32).to(tl.float32)
    else:
        scores = tl.dot(queries, keys, out_dtype=tl.float32, input_precision="ieee")
    return scores


@triton.jit
def biased(
    scores: tl.tensor, bias: tl.pointer_type, head: tl.tensor, farthest: tl.tensor, row: tl.tensor, key: tl.tensor, factor: tl.tensor
) -> tl.tensor:  # fmt: skip
    """Returns the scores times the factor, plus the bias of their distances; both are in powers of two."""
    distance = key[None, :] - row[:, None]
    inside = tl.minimum(tl.maximum(distance, -farthest), farthest)  # others are masked, or of rows past the sequence
    return tl.fma(tl.load(bias + head * (2 * farthest + 1) + farthest + inside), BIAS_FACTOR, scores * factor)


@triton.jit
def added(
    scores: tl.tensor, values: tl.tensor, largest: tl.tensor, total: tl.tensor, sums: tl.tensor, factor: tl.tensor, LAZY: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Returns m', l' and O' after a tile of scores, which are not multiplied by the factor yet; it is positive."""
    grown = tl.maximum(largest, tl.max(scores, 1))
    if LAZY:
        if tl.max((grown - largest) * factor, 0) > MOST_GROWN:  # infinite in the first tile
            faded = exp2_approximate((largest - grown) * factor)
            largest, total, sums = grown, total * faded, sums * faded[:, None]
    else:
        faded = exp2_approximate((largest - grown) * factor)
        largest, total, sums = grown, total * faded, sums * faded[:, None]
    p = exp2_approximate(tl.fma(scores, factor, (-largest * factor)[:, None]))
    sums = tl.dot(p.to(values.dtype), values, sums, out_dtype=tl.float32, input_precision="ieee")
    return largest, total + tl.sum(p, 1), sums
