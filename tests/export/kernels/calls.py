"""Kernels as functions: each makes its outputs and launches once. They run in the interpreter, too (`interpreter`)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from export.kernels import attention, block_sparse, embedding, gated, gemm, norm, paged_attention, pooling, qkv, quantize, w4a16, w8a16
from export.kernels.activation_codes import Activation
from export.kernels.attention import Scores
from export.kernels.block_sparse import SparseWeight
from export.kernels.embedding import Lookup
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.norm import Keep, Norm
from export.kernels.paged_attention import Pages
from export.kernels.pooling import Weights
from export.kernels.qkv import Heads, Rotary
from export.kernels.w4a16 import Int4Weight


def quantize_tensor(x: Tensor, scale: float) -> Tensor:
    codes = torch.empty_like(x, dtype=torch.int8)
    quantize.tensor_launch(x, scale, codes).run()
    return codes


def int8_gemm(x_NI: Tensor, scale: float | Tensor, weight: Int8Weight, output: Output) -> Tensor:
    out_NO = torch.empty(x_NI.shape[0], weight.codes.shape[0], dtype=output.stored, device=x_NI.device)
    gemm.launch(x_NI, scale, weight, output, out_NO).run()
    return out_NO


def block_sparse_gemm(x_NI: Tensor, scale: float | Tensor, weight: SparseWeight, output: Output) -> Tensor:
    out_NO = torch.empty(x_NI.shape[0], weight.packed.shape[0], dtype=output.stored, device=x_NI.device)
    block_sparse.launch(x_NI, scale, weight, output, out_NO).run()
    return out_NO


def norm_quantize(x_NI: Tensor, residual_NI: Tensor | None, layer: Norm, scale: float | None, keep: Keep) -> tuple[Tensor, Tensor, Tensor]:
    scales = x_NI.new_empty(len(x_NI), 1, dtype=torch.float32) if scale is None else torch.tensor(scale, device=x_NI.device)
    codes_NI, kept_NI = torch.empty_like(x_NI, dtype=torch.int8), torch.empty_like(x_NI)
    norm.launch(x_NI, residual_NI, layer, codes_NI, scales if scale is None else scale, kept_NI, keep).run()
    return codes_NI, scales, kept_NI


def embed_quantize(
    word: Lookup, kind: Lookup | None, position: Lookup | None, layer: Norm, scale: float | None, keep: Keep = "norm"
) -> tuple[Tensor, Tensor, Tensor]:
    (tokens,), inputs, table = word[0].shape, len(layer.gain), word[1]
    scales = torch.empty(tokens, 1, device=table.device) if scale is None else torch.tensor(scale, device=table.device)
    codes_NI, kept_NI = (torch.empty(tokens, inputs, dtype=dtype, device=table.device) for dtype in (torch.int8, table.dtype))
    embedding.launch((word, kind, position), layer, codes_NI, scales if scale is None else scale, kept_NI, keep).run()
    return codes_NI, scales, kept_NI


def packed_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, start_B: Tensor, scores: Scores, bias_HR: Tensor | None = None) -> Tensor:
    lengths = [end - start for start, end in itertools.pairwise(start_B.tolist())]
    out_THD = torch.empty_like(q_THD, dtype=v_TKD.dtype if scores.out_scale is None else torch.int8)
    attention.launch((q_THD, k_TKD, v_TKD), start_B, lengths, scores, out_THD, bias_HR).run()
    return out_THD


def int8_qkv(
    x_NI: Tensor, scale: float | Tensor, weight: Int8Weight, heads: Heads, rotary: Rotary | None, slots: Tensor | None = None, room: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values go to rows of their own where there are slots, in a memory of `room` rows of zeros."""
    q, k, v = (x_NI.new_empty(len(x_NI), count, heads.dimension, dtype=dtype) for count, dtype in heads.types())
    if slots is not None:
        k, v = (part.new_zeros(room, *part.shape[1:]) for part in (k, v))
    qkv.launch(x_NI, scale, weight, heads, rotary, (q, k, v), slots).run()
    return q, k, v


def pooled(x_TI: Tensor, start_B: Tensor, weights: Weights) -> Tensor:
    out_BI = torch.full((len(start_B) - 1, x_TI.shape[1]), float("nan"))
    pooling.launch(x_TI, start_B, weights, out_BI).run()
    return out_BI


def quantize_tokens(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = torch.empty_like(x_NI, dtype=torch.int8), torch.empty(len(x_NI), 1)
    quantize.token_launch(x_NI, codes, scales).run()
    return codes, scales


def gated_gemm(x_NI: Tensor, scale: float | Tensor, gate: Int8Weight, up: Int8Weight, output: Output) -> Tensor:
    out_NO = torch.empty(x_NI.shape[0], gate.codes.shape[0], dtype=output.stored)
    gated.launch(x_NI, scale, gate, up, output, out_NO).run()
    return out_NO


def w4a16_gemm(x_NI: Tensor, weight: Int4Weight, activation: Activation = "none") -> Tensor:
    out_NO = x_NI.new_empty(len(x_NI), len(weight.packed))
    w4a16.launch(x_NI, weight, out_NO, activation).run()
    return out_NO


def w8a16_gemm(x_NI: Tensor, weight: Int8Weight, activation: Activation = "none") -> Tensor:
    out_NO = x_NI.new_empty(len(x_NI), len(weight.codes))
    w8a16.launch(x_NI, weight, out_NO, activation).run()
    return out_NO


def attention_to_pages(q_NHD: Tensor, pages: Pages, scaling: float, out_scale: float | None = None, span: int | None = None) -> Tensor:
    """With `span` in place of `SPAN`, so that a few keys are several spans."""
    out_NHD, before = torch.empty_like(q_NHD, dtype=torch.int8 if out_scale is not None else q_NHD.dtype), paged_attention.SPAN
    try:
        paged_attention.SPAN = span or before
        for launch in paged_attention.launches(q_NHD, pages, scaling, out_NHD, out_scale):
            launch.run()
    finally:
        paged_attention.SPAN = before
    return out_NHD
