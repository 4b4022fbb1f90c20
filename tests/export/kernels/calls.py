"""Kernels as functions: each makes its outputs and launches once. They run in the interpreter, too (`interpreter`)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from export.kernels import attention, block_sparse, embedding, gemm, norm, qkv, quantize
from export.kernels.attention import Scores
from export.kernels.block_sparse import SparseWeight
from export.kernels.embedding import Lookup
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.norm import Keep, Norm
from export.kernels.qkv import Heads, Rotary


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


def embed_quantize(word: Lookup, kind: Lookup, position: Lookup, layer: Norm, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    (tokens,), inputs, table = word[0].shape, len(layer.gain), word[1]
    scales = torch.empty(tokens, 1, device=table.device) if scale is None else torch.tensor(scale, device=table.device)
    codes_NI, kept_NI = (torch.empty(tokens, inputs, dtype=dtype, device=table.device) for dtype in (torch.int8, table.dtype))
    embedding.launch((word, kind, position), layer, codes_NI, scales if scale is None else scale, kept_NI).run()
    return codes_NI, scales, kept_NI


def packed_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, start_B: Tensor, scores: Scores) -> Tensor:
    lengths = [end - start for start, end in itertools.pairwise(start_B.tolist())]
    out_THD = torch.empty_like(q_THD, dtype=v_TKD.dtype if scores.out_scale is None else torch.int8)
    attention.launch((q_THD, k_TKD, v_TKD), start_B, lengths, scores, out_THD).run()
    return out_THD


def int8_qkv(x_NI: Tensor, scale: float | Tensor, weight: Int8Weight, heads: Heads, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x_NI.new_empty(len(x_NI), count, heads.dimension, dtype=dtype) for count, dtype in heads.types())
    qkv.launch(x_NI, scale, weight, heads, rotary, (q, k, v)).run()
    return q, k, v
