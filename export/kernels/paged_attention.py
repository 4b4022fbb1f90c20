"""Attention of new tokens to keys and values in pages: decoding, with the keys of a token split over programs (flash decoding).

    key j of a sequence    page table[b, j div S], slot j mod S        pages [P, S, K, D] (Kwon et al. 2023, https://arxiv.org/abs/2309.06180)
    s_j = q . k_j scaling, P = softmax(s), o = P V                     over the keys 0 to length - 1 of its sequence

A program takes one new token, one head of keys with the heads of queries that share it, and `SPAN` keys: a short tile of queries, for which
the bytes of the pages are the limit. Where a sequence can be longer than a span, each program stores its largest score m, its sum l and its
unscaled output O, and `combined_kernel` adds them up (https://pytorch.org/blog/flash-decoding):

    m = max m_p,   o = sum_p 2^((m_p - m) f) O_p / sum_p 2^((m_p - m) f) l_p

Spans begin at multiples of SPAN, whatever else is in the batch, and keys are added in the order of the sequence: an output has the same
bits in every company and on any pages. Several new tokens of one sequence are several rows with lengths of their own: a token sees its own
key and those before it.

Bound: that of `attention`, with another 2^-22 |exact| for each span.

Left out: keys and values in int8; windows.

Shape suffixes: N new tokens, B sequences, P pages, S slots of a page, H heads of queries, K heads of keys, D dimension, R spans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.activation_codes import exp2_approximate
from export.kernels.dependent_launch import wait_for_inputs
from export.kernels.epilogue import stored
from export.kernels.launch import Cost, Launch, bytes_of, cdiv, check_scale, check_step, power_of_two, unit_of

LOG2_E = math.log2(math.e)
SPAN = 256
"""Keys of a program: at batch 8 with 12 heads and 1,024 keys that is 384 programs."""
FEWEST_QUERIES = 16
"""Rows of a matrix instruction."""


@dataclass(frozen=True)
class Pages:
    """Keys and values of one layer, and where those of each new token are."""

    keys: Tensor
    """float16 or float32 [P, S, K, D]."""
    values: Tensor
    """The same."""
    table: Tensor
    """int32 [B, W]: page of each S keys of a sequence, from 0 to P - 1; entries behind its last key are not read."""
    sequence: Tensor
    """int32 [N]: row of the table, of each new token."""
    length: Tensor
    """int32 [N]: keys that the token sees, at least 1, its own included."""

    @property
    def longest(self) -> int:
        """Most keys of a sequence."""
        return self.table.shape[1] * self.keys.shape[1]

    @property
    def spans(self) -> int:
        """R: programs that share the keys of the longest sequence."""
        return cdiv(self.longest, SPAN)


def launches(q_NHD: Tensor, pages: Pages, scaling: float, out_NHD: Tensor, out_scale: float | None = None) -> tuple[Launch, ...]:
    """Returns the launches of attention: one, or two where spans have to be combined.

    Args:
        q_NHD: Queries, in the type of the keys; K divides H, and D is at most 256.
        pages: Keys and values, those of the new tokens included.
        scaling: Usually 1 / sqrt(D).
        out_NHD: Takes the outputs, in the type of the values, or int8 codes.
        out_scale: Quantizes the outputs with this scale; None for the type of the values.
    """
    check_scale("scaling", scaling)
    if out_scale is not None:
        check_step("scale of the output", out_scale)
    (rows, heads, dimension), (_, slots, key_heads, _) = q_NHD.shape, pages.keys.shape
    group, spans = heads // key_heads, pages.spans
    block_d, tile_k, num_warps = max(16, power_of_two(dimension)), 64, 4
    if pages.keys.dtype == torch.float32:  # no matrix instruction: the products of a tile are in registers
        tile_k, num_warps = 32, 4 if dimension <= 64 else 8
    parts, largest, sums = out_NHD, None, None
    if spans > 1:
        parts = torch.empty(rows, heads, spans, dimension, dtype=torch.float32, device=q_NHD.device)
        largest, sums = (torch.empty(rows, heads, spans, dtype=torch.float32, device=q_NHD.device) for _ in range(2))
    factor, given = scaling * LOG2_E, 1.0 if out_scale is None else out_scale
    shared = {"length": pages.length, "heads": heads, "spans": spans, "D": dimension, "BLOCK_D": block_d, "SPAN": SPAN, "out_scale": given}
    arguments = {
        **shared, "q": q_NHD, "k": pages.keys, "v": pages.values, "table": pages.table, "sequence": pages.sequence,
        "out": parts, "largest_out": largest, "total_out": sums, "factor": factor, "key_heads": key_heads, "width": pages.table.shape[1],
        "SLOTS": slots, "GROUP": group, "BLOCK_G": max(FEWEST_QUERIES, power_of_two(group)), "TILE_K": tile_k,
    }  # fmt: skip
    read = 2 * rows * pages.longest * key_heads * dimension  # numbers, if all sequences are full
    num_bytes = bytes_of(q_NHD, pages.table, pages.sequence, pages.length, parts, largest, sums) + read * pages.keys.element_size()
    cost = Cost(num_bytes, 2 * read * group, unit_of(pages.keys))
    first = Launch(paged_attention_kernel, (rows, key_heads, spans), arguments, cost, num_warps, 3)
    if largest is None or sums is None:
        return (first,)
    combining = {**shared, "parts": parts, "largest_of": largest, "total_of": sums, "out": out_NHD, "factor": factor}
    cost = Cost(bytes_of(parts, largest, sums, out_NHD), 2 * parts.numel(), "fp32")
    return first, Launch(combined_kernel, (rows, heads), combining, cost, 1, 1)


@triton.jit
def paged_attention_kernel(
    q: tl.pointer_type, k: tl.pointer_type, v: tl.pointer_type, table: tl.pointer_type, sequence: tl.pointer_type, length: tl.pointer_type,
    out: tl.pointer_type, largest_out: tl.pointer_type, total_out: tl.pointer_type, factor: tl.tensor, out_scale: tl.tensor,
    heads: tl.tensor, key_heads: tl.tensor, width: tl.tensor, spans: tl.tensor,
    SLOTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr, TILE_K: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program: a new token, a head of keys, a span of keys."""
    wait_for_inputs(DEPENDENT)
    row, key_head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys_seen = tl.load(length + row)
    first = span * SPAN
    if first >= keys_seen:
        return
    g, d, column = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, TILE_K)
    head = key_head * GROUP + g
    stays = (g < GROUP)[:, None] & (d < D)[None, :]
    queries = tl.load(q + row.to(tl.int64) * heads * D + (head[:, None] * D + d[None, :]), stays, other=0.0)
    pages_of = table + tl.load(sequence + row).to(tl.int64) * width
    largest, total = tl.full((BLOCK_G,), -float("inf"), tl.float32), tl.zeros((BLOCK_G,), tl.float32)
    sums = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for begin in range(first, tl.minimum(keys_seen, first + SPAN), TILE_K):
        key = begin + column
        inside = key < keys_seen
        page = tl.load(pages_of + key // SLOTS, inside, other=0).to(tl.int64)
        slot = (page * SLOTS + key % SLOTS) * key_heads * D + key_head * D
        keys = tl.load(k + slot[None, :] + d[:, None], inside[None, :] & (d < D)[:, None], other=0.0)
        values = tl.load(v + slot[:, None] + d[None, :], inside[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.dot(queries, keys, out_dtype=tl.float32, input_precision="ieee")
        scores = tl.where(inside[None, :], scores, -float("inf"))  # the first key of a span is seen by every row
        grown = tl.maximum(largest, tl.max(scores, 1))
        p = exp2_approximate(tl.fma(scores, factor, (-grown * factor)[:, None]))
        faded = exp2_approximate((largest - grown) * factor)
        sums = tl.dot(p.to(values.dtype), values, sums * faded[:, None], out_dtype=tl.float32, input_precision="ieee")
        total, largest = total * faded + tl.sum(p, 1), grown
    if largest_out is None:
        at = row.to(tl.int64) * heads * D + (head[:, None] * D + d[None, :])
        stored(sums * tl.div_rn(1.0, total)[:, None], out, at, stays, out_scale)
    else:
        part = (row.to(tl.int64) * heads + head) * spans + span
        tl.store(out + part[:, None] * D + d[None, :], sums, stays)
        tl.store(largest_out + part, largest, g < GROUP)
        tl.store(total_out + part, total, g < GROUP)


@triton.jit
def combined_kernel(
    parts: tl.pointer_type, largest_of: tl.pointer_type, total_of: tl.pointer_type, length: tl.pointer_type, out: tl.pointer_type,
    factor: tl.tensor, out_scale: tl.tensor, heads: tl.tensor, spans: tl.tensor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPAN: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program: a head of a new token."""
    wait_for_inputs(DEPENDENT)
    row, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK_D)
    part, inside = (row.to(tl.int64) * heads + head) * spans, d < D
    largest, total = tl.load(largest_of + part), tl.load(total_of + part)
    sums = tl.load(parts + part * D + d, inside, other=0.0)
    for span in range(1, tl.cdiv(tl.load(length + row), SPAN)):
        other = tl.load(largest_of + part + span)
        grown = tl.maximum(largest, other)
        faded, share = exp2_approximate((largest - grown) * factor), exp2_approximate((other - grown) * factor)
        total = total * faded + tl.load(total_of + part + span) * share
        sums = sums * faded + tl.load(parts + (part + span) * D + d, inside, other=0.0) * share
        largest = grown
    stored(sums * tl.div_rn(1.0, total), out, (row.to(tl.int64) * heads + head) * D + d, inside, out_scale)
