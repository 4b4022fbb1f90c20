"""What the kernels of `export.kernels` have to answer, in torch, for checks and tests.

Shape suffixes are those of the kernels.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from export.kernels.activation_codes import Activation, Method
from export.kernels.attention import Scores
from export.kernels.block_sparse import Packed, SparseWeight
from export.kernels.embedding import Lookup
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.norm import Keep, Norm
from export.kernels.paged_attention import Pages
from export.kernels.pooling import Weights
from export.kernels.qkv import Heads, Rotary
from export.kernels.w4a16 import Int4Weight
from foundation.schemes.int4 import unpack as unpacked_int4

FITTED_ERROR, LOGIT_ERROR, SHORT_LOGIT_ERROR = 7.0e-8, 3.1e-6, 2.8e-4
"""Errors of y Phi(y) by the fits `FITTED_LOGIT`, `LOGIT` and `SHORT_LOGIT`."""


def quantized(x: Tensor, scale: float) -> Tensor:
    """Returns the codes of a tensor, in torch."""
    steps = x.float() / torch.tensor(scale, dtype=torch.float32)
    return torch.round(steps).clamp(-128, 127).to(torch.int8)


def quantized_tokens(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes of tokens, and the scale of each."""
    scale_N = torch.clamp(x_NI.float().abs().amax(dim=1, keepdim=True) / 127, min=2.0**-63)
    return torch.round(x_NI.float() / scale_N).clamp(-127, 127).to(torch.int8), scale_N


def outputs(sums_NO: Tensor, input_scale: float | Tensor, scale_O: Tensor, bias_O: Tensor | None, output: Output) -> Tensor:
    """Returns the outputs of int32 sums, in torch."""
    if isinstance(input_scale, Tensor):
        y_NO = sums_NO.float() * input_scale * scale_O
    else:
        y_NO = sums_NO.float() * (torch.tensor(input_scale, dtype=torch.float32) * scale_O)
    y_NO = y_NO if bias_O is None else y_NO + bias_O
    if output.activation == "gelu":
        y_NO = torch.nn.functional.gelu(y_NO)
    if output.activation == "gelu_tanh":
        y_NO = torch.nn.functional.gelu(y_NO, approximate="tanh")
    if output.activation == "silu":
        y_NO = torch.nn.functional.silu(y_NO)
    if output.activation == "relu":
        y_NO = torch.relu(y_NO)
    if output.scale is None:
        return y_NO.to(output.dtype)
    return torch.round(y_NO / torch.tensor(output.scale, dtype=torch.float32)).clamp(-128, 127).to(torch.int8)


def gemm(x_NI: Tensor, scale: float | Tensor, weight: Int8Weight, output: Output) -> Tensor:
    """Returns the outputs of an int8 layer, `[N, O]`."""
    sums_NO = (x_NI.long() @ weight.codes.long().T).int()
    return outputs(sums_NO, scale, weight.scale, weight.bias, output)


def gated(x_NI: Tensor, scale: float | Tensor, gate: Int8Weight, up: Int8Weight, output: Output) -> Tensor:
    """Returns the outputs of gate and up, `[N, O]`."""
    opened = gemm(x_NI, scale, gate, Output(output.activation, torch.float32))
    z_NO = opened * gemm(x_NI, scale, up, Output(dtype=torch.float32))
    return z_NO.to(output.dtype) if output.scale is None else quantized(z_NO, output.scale)


def unpack(packed: Packed) -> Tensor:
    """Returns the codes of the whole weight, int8 `[O, I]`; exact."""
    left_ST, (outputs, inputs), side = packed.left(), packed.shape, packed.side
    blocks_STbb = packed.codes.new_zeros(*left_ST.shape, side, side)
    blocks_STbb[left_ST] = packed.codes
    return blocks_STbb.transpose(1, 2).reshape(left_ST.shape[0] * side, -1)[:outputs, :inputs].contiguous()


def block_sparse_gemm(x_NI: Tensor, scale: float | Tensor, weight: SparseWeight, output: Output) -> Tensor:
    """Returns the outputs of a block-sparse int8 layer, `[N, O]`: the whole weight, multiplied densely."""
    sums_NO = (x_NI.long() @ unpack(weight.packed).long().T).int()
    return outputs(sums_NO, scale, weight.scale, weight.bias, output)


def norm(x_NI: Tensor, residual_NI: Tensor | None, layer: Norm, scale: float | None, keep: Keep) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes of a normalized sum, their scales, and what is kept."""
    h_NI = x_NI.float() if residual_NI is None else x_NI.float() + residual_NI.float()
    centred_NI = h_NI - h_NI.mean(dim=1, keepdim=True) if layer.centred else h_NI
    z_NI = centred_NI / torch.sqrt(centred_NI.square().mean(dim=1, keepdim=True) + layer.eps) * layer.gain
    z_NI = z_NI if layer.bias is None else z_NI + layer.bias
    if scale is None:
        scales = torch.clamp(z_NI.abs().amax(dim=1, keepdim=True) / 127, min=2.0**-63)
        codes_NI = torch.round(z_NI / scales).clamp(-127, 127).to(torch.int8)
    else:
        scales = torch.tensor(scale)
        codes_NI = torch.round(z_NI / scales).clamp(-128, 127).to(torch.int8)
    return codes_NI, scales, (h_NI if keep == "sum" else z_NI).to(x_NI.dtype)


def summed(word: Lookup, kind: Lookup, position: Lookup) -> Tensor:
    """Returns the sum of the three embeddings of each token, float32 `[N, I]`."""
    (word_id, words), (kind_id, kinds), (position_id, positions) = word, kind, position
    return words[word_id].float() + kinds[kind_id].float() + positions[position_id].float()


def embedding(word: Lookup, kind: Lookup, position: Lookup, layer: Norm, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes of normalized embeddings, their scales, and the embeddings."""
    codes_NI, scales, kept_NI = norm(summed(word, kind, position), None, layer, scale, "norm")
    return codes_NI, scales, kept_NI.to(word[1].dtype)


def attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, start_B: Tensor, scores: Scores, bias_HR: Tensor | None = None) -> Tensor:
    """Returns the exact outputs, float64 `[T, H, D]`: one sequence and head after another, softmax of the whole row."""
    out_THD = torch.zeros(q_THD.shape, dtype=torch.float64)
    shared = q_THD.shape[1] // k_TKD.shape[1]
    for start, end in itertools.pairwise(start_B.tolist()):
        for head in range(q_THD.shape[1]):
            q_ND, k_ND, v_ND = (
                part[start:end, at].double() for part, at in ((q_THD, head), (k_TKD, head // shared), (v_TKD, head // shared))
            )
            s_NN = q_ND @ k_ND.T * scores.factor
            if bias_HR is not None:
                row_N = torch.arange(end - start)
                s_NN = s_NN + bias_HR[head].double()[row_N[None, :] - row_N[:, None] + bias_HR.shape[1] // 2]
            if scores.causal:
                s_NN = s_NN.masked_fill(torch.ones_like(s_NN).triu(1).bool(), -math.inf)
            out_THD[start:end, head] = s_NN.softmax(dim=1) @ v_ND
    return out_THD


def attention_to_pages(q_NHD: Tensor, pages: Pages, scaling: float) -> Tensor:
    """Returns the exact outputs, float64 `[N, H, D]`: keys and values of each new token's text, gathered from their pages."""
    out_NHD, shared = torch.zeros(q_NHD.shape, dtype=torch.float64), q_NHD.shape[1] // pages.keys.shape[2]
    for row, (text, seen) in enumerate(zip(pages.sequence.tolist(), pages.length.tolist(), strict=True)):
        keys, values = (memory[pages.table[text].long()].flatten(0, 1)[:seen].double() for memory in (pages.keys, pages.values))
        for head in range(q_NHD.shape[1]):
            scores = keys[:, head // shared] @ q_NHD[row, head].double() * scaling
            out_NHD[row, head] = scores.softmax(dim=0) @ values[:, head // shared]
    return out_NHD


def pooled(x_TI: Tensor, start_B: Tensor, weights: Weights) -> Tensor:
    """Returns the exact mean of the states of each sequence, float64 `[B, I]`; zeros for one without tokens."""
    out_BI = torch.zeros(len(start_B) - 1, x_TI.shape[1], dtype=torch.float64)
    for sequence, (start, end) in enumerate(itertools.pairwise(start_B.tolist())):
        total = 0.0
        for place, token in enumerate(range(start, end), 1):
            weight = place if weights == "weighted" else 1
            out_BI[sequence] += weight * x_TI[token].double()
            total += weight
        out_BI[sequence] /= max(total, 1.0)
    return out_BI


def qkv(x_NI: Tensor, scale: float | Tensor, weight: Int8Weight, heads: Heads, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values."""
    sums_NO = (x_NI.long() @ weight.codes.long().T).int()
    y_NO = outputs(sums_NO, scale, weight.scale, weight.bias, Output(dtype=torch.float32))
    y_NGD = y_NO.reshape(len(x_NI), -1, heads.dimension)
    q, k, v = torch.split(y_NGD, [heads.queries, heads.keys, heads.keys], dim=1)
    if rotary is not None:
        q, k = (_rotated(part, rotary) for part in (q, k))
    return _stored(q, heads.query_scale, heads.dtype), _stored(k, heads.key_scale, heads.dtype), v.to(heads.dtype)


def _rotated(y_NHD: Tensor, rotary: Rotary) -> Tensor:
    first, second = y_NHD.chunk(2, dim=2)
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)


def _stored(z_NHD: Tensor, scale: float | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return z_NHD.to(dtype)
    return torch.round(z_NHD / torch.tensor(scale, dtype=torch.float32)).clamp(-128, 127).to(torch.int8)


def rounded_weight(weight: Int4Weight, dtype: torch.dtype = torch.float16) -> Tensor:
    """Returns s (q - z), rounded to a float type, `[O, I]`."""
    codes_OI = unpacked_int4(weight.packed, weight.inputs).float()
    group_I = torch.arange(weight.inputs) // weight.group_size
    steps_OI = codes_OI if weight.zero_point is None else codes_OI - weight.zero_point.float()[:, group_I]
    return (steps_OI * weight.scale[:, group_I]).to(dtype)


def w4a16_gemm(x_NI: Tensor, weight: Int4Weight) -> Tensor:
    """Returns the outputs of a w4a16 layer, `[N, O]`: products of the rounded weights, added in float32."""
    y_NO = x_NI.float() @ rounded_weight(weight, x_NI.dtype).float().T
    return (y_NO if weight.bias is None else y_NO + weight.bias).to(x_NI.dtype)


def w8a16_gemm(x_NI: Tensor, weight: Int8Weight) -> Tensor:
    """Returns the outputs of a w8a16 layer without a bias, float32 `[N, O]`."""
    return (x_NI.double() @ weight.codes.double().T * weight.scale.double()).float()


def distance_bound(y: Tensor, f_y: Tensor, scale: float, activation: Activation, method: Method) -> Tensor:
    """Returns how near to a tie f(y) / s has to be for a code to differ from the correctly rounded one, in steps.

    Args:
        y: float64, any shape.
        f_y: The exact f(y), float64, same shape.
        scale: s.
        activation: f.
        method: How codes are found.
    """
    if activation == "none":
        return y.new_full(y.shape, 0.0) + 2.0**-16
    if method == "logistic":
        return ((LOGIT_ERROR if activation == "gelu" else 0.0) + 2.0**-19 * f_y.abs()) / scale + 2.0**-16
    if method == "tanh":
        return ((SHORT_LOGIT_ERROR if activation == "gelu" else 0.0) + 2.0**-12 * y.abs()) / scale + 2.0**-15
    return 2.0**-20 * y.abs() / scale + 2.0**-16
