"""Launches of every kernel at the shapes of models, with what they have to answer: for tables, for checks and for times.

    CASES    shapes of BERT-base (512 or 4096 rows of 768) and of Llama-3-8B (batches of 16 or fewer rows)
    LARGE    the int8 layers of BERT-large for 4096 rows, and its feed-forward with 80 % of its blocks zero
    SMALL    one of each kernel, small enough for the interpreter, with edges that no tile fits

A `Maker` makes the tensors: on the device `meta` without memory; elsewhere the same values for the same seed, so that a case made on the
CPU says what the one on the GPU has to answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import references
from export.kernels import attention, block_sparse, embedding, gated, gemm, norm, paged_attention, pooling, qkv, quantize, w4a16, w8a16
from export.kernels.activation_codes import Activation
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.gemm import Tile
from export.kernels.launch import Launch
from export.kernels.paged_attention import Pages
from export.kernels.rounding import INTERPRETED

INPUT_SCALE = 0.01
LEFT = 0.2
"""Blocks that are left where 80 % are zero."""


@dataclass(frozen=True)
class Bound:
    """How far outputs may be from those of the reference: the bounds that the kernels state, loosened to a multiple of the type's step."""

    relative: float = 0.0
    absolute: float = 0.0
    steps: int = 0
    """Of codes: 1 where a float before them has a bound of its own, so that a tie may fall either way."""


HALF = Bound(2.0**-10, 2.0**-14, 1)
"""A step of float16."""


@dataclass(frozen=True)
class Case:
    """A launch, what it writes, and what that has to be."""

    launch: Launch
    outputs: tuple[Tensor, ...]
    reference: Callable[[], tuple[Tensor, ...]]
    """Computes the outputs in torch; for tensors on the CPU."""
    bound: Bound = Bound()
    tiled: Callable[[Tile], Launch] | None = None
    """The launch in another tile, where that can be chosen."""


class Maker:
    """Makes tensors.

    Args:
        device: Where; `meta` has no values.
        seed: Of the values, which are the same on every device.
    """

    def __init__(self, device: str | torch.device, seed: int = 0) -> None:
        self.device = torch.device(device)
        self._random = torch.Generator().manual_seed(seed)

    @property
    def is_meta(self) -> bool:
        """Whether tensors have no values."""
        return self.device.type == "meta"

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns an output: zeros."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns normal numbers."""
        if self.is_meta:
            return self.empty(*shape, dtype=dtype)
        return torch.randn(shape, generator=self._random).to(dtype).to(self.device)

    def halves(self, *shape: int) -> Tensor:
        """Returns normal numbers in float16."""
        return self.floats(*shape, dtype=torch.float16)

    def scales(self, *shape: int, around: float = 5e-4) -> Tensor:
        """Returns positive numbers, float32."""
        if self.is_meta:
            return self.empty(*shape)
        return ((torch.rand(shape, generator=self._random) + 0.5) * around).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        """Returns integers from `low` to below `high`."""
        if self.is_meta:
            return self.empty(*shape, dtype=dtype)
        return torch.randint(low, high, shape, generator=self._random, dtype=dtype).to(self.device)

    def codes(self, *shape: int) -> Tensor:
        """Returns int8 codes."""
        return self.integers(-127, 128, *shape)

    def weight(self, outputs: int, inputs: int) -> Int8Weight:
        """Returns an int8 weight with bias."""
        return Int8Weight(self.codes(outputs, inputs), self.scales(outputs), self.floats(outputs))

    def starts(self, sequences: int, length: int) -> Tensor:
        """Returns where sequences of one length begin, int32 `[B + 1]`."""
        if self.is_meta:
            return self.empty(sequences + 1, dtype=torch.int32)
        return torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device=self.device)


META = Maker("meta")
Make = Callable[[Maker], Case]


def tensor_case(make: Maker, rows: int, inputs: int) -> Case:
    """Codes with one scale."""
    x, codes = make.halves(rows, inputs), make.empty(rows, inputs, dtype=torch.int8)
    return Case(quantize.tensor_launch(x, 0.1, codes), (codes,), lambda: (references.quantized(x, 0.1),))


def gemm_case(make: Maker, rows: int, outputs: int, inputs: int, output: Output) -> Case:
    """An int8 GEMM with bias, the input with a scale per token."""
    codes, scale, weight = make.codes(rows, inputs), make.scales(rows, 1, around=INPUT_SCALE), make.weight(outputs, inputs)
    out = make.empty(rows, outputs, dtype=output.stored)
    return Case(
        gemm.launch(codes, scale, weight, output, out),
        (out,),
        lambda: (references.gemm(codes, scale, weight, output),),
        Bound() if output.activation == "none" else HALF,
        lambda tile: gemm.launch(codes, scale, weight, output, out, tile),
    )


def sparse_case(make: Maker, rows: int, outputs: int, inputs: int, side: int, blocks: int) -> Case:
    """A block-sparse GEMM with so many blocks left; its sides divide outputs and inputs."""
    weight = sparse_weight(make, outputs, inputs, side, blocks)
    codes, scale = make.codes(rows, inputs), make.scales(rows, 1, around=INPUT_SCALE)
    output, out = Output(), make.empty(rows, outputs, dtype=torch.float16)
    launch = block_sparse.launch(codes, scale, weight, output, out)
    return Case(launch, (out,), lambda: (references.block_sparse_gemm(codes, scale, weight, output),))


def sparse_weight(make: Maker, outputs: int, inputs: int, side: int, blocks: int) -> block_sparse.SparseWeight:
    """Returns a weight with so many blocks left, anywhere."""
    strips, columns = outputs // side, inputs // side
    scale, bias = make.scales(outputs), make.floats(outputs)
    if make.is_meta:
        bitmap = make.empty((strips * columns + 7) // 8, dtype=torch.uint8)
        packed = block_sparse.Packed((outputs, inputs), bitmap, make.empty(blocks, side, side, dtype=torch.int8))
        index = block_sparse.Index(make.empty(strips + 1, dtype=torch.int32), make.empty(blocks, dtype=torch.int32))
        return block_sparse.SparseWeight(packed, index, scale, bias)
    left = make.floats(strips * columns).cpu().argsort() < blocks
    mask = left.reshape(strips, columns).repeat_interleave(side, 0).repeat_interleave(side, 1)
    whole = block_sparse.pack(make.codes(outputs, inputs).cpu() * mask, side)
    packed = block_sparse.Packed(whole.shape, whole.bitmap.to(make.device), whole.codes.to(make.device))
    return block_sparse.SparseWeight(packed, block_sparse.index(packed), scale, bias)


def norm_case(make: Maker, rows: int, inputs: int, centred: bool) -> Case:
    """LayerNorm of a sum that keeps the norm, as in BERT, or RMSNorm that keeps the sum, as in Llama; codes with a scale per token."""
    layer = norm.Norm(make.floats(inputs), make.floats(inputs) if centred else None, 1e-12, centred)
    keep: norm.Keep = "norm" if centred else "sum"
    x, residual = make.halves(rows, inputs), make.halves(rows, inputs)
    codes, scale, kept = make.empty(rows, inputs, dtype=torch.int8), make.empty(rows, 1), make.empty(rows, inputs, dtype=torch.float16)
    launch = norm.launch(x, residual, layer, codes, scale, kept, keep)
    return Case(launch, (codes, scale, kept), lambda: references.norm(x, residual, layer, None, keep), HALF)


def embedding_case(make: Maker, tokens: int, inputs: int, words: int = 30522) -> Case:
    """The three tables of BERT; codes with a scale per token."""
    lookups = [(make.integers(0, rows, tokens, dtype=torch.int64), make.halves(rows, inputs)) for rows in (words, 2, 512)]
    word, kind, position = lookups
    layer = norm.Norm(make.floats(inputs), make.floats(inputs), 1e-12)
    codes, scale = make.empty(tokens, inputs, dtype=torch.int8), make.empty(tokens, 1)
    kept = make.empty(tokens, inputs, dtype=torch.float16)
    launch = embedding.launch((word, kind, position), layer, codes, scale, kept)
    return Case(launch, (codes, scale, kept), lambda: references.embedding(word, kind, position, layer, None), HALF)


def w4a16_case(make: Maker, rows: int, outputs: int, inputs: int, group_size: int) -> Case:
    """A w4a16 GEMM with zero points."""
    groups = (outputs, inputs // group_size)
    packed = make.integers(0, 256, outputs, inputs // 2, dtype=torch.uint8)
    weight = w4a16.Int4Weight(packed, inputs, group_size, make.scales(*groups, around=2e-3), make.integers(-8, 8, *groups))
    x, out = make.halves(rows, inputs), make.empty(rows, outputs, dtype=torch.float16)
    bound = Bound(2.0**-9, 2.0**-8)  # the reference adds in another order
    return Case(w4a16.launch(x, weight, out), (out,), lambda: (references.w4a16_gemm(x, weight),), bound)


def w8a16_case(make: Maker, rows: int, outputs: int, inputs: int) -> Case:
    """A GEMM of int8 rows and floats, as a head multiplies."""
    weight = Int8Weight(make.codes(outputs, inputs), make.scales(outputs))
    x, out = make.halves(rows, inputs), make.empty(rows, outputs, dtype=torch.float32)
    launch = w8a16.launch(x, weight, out)
    return Case(launch, (out,), lambda: (references.w8a16_gemm(x, weight),), Bound(1e-4, 1e-4))


def attention_case(make: Maker, sequences: int, length: int, heads: int, dimension: int, dtype: torch.dtype, biased: bool = False) -> Case:
    """Attention over sequences of one length, so that the count of operations is known; with a bias of distances as in T5 and MPNet."""
    shape, start = (sequences * length, heads, dimension), make.starts(sequences, length)
    values = torch.float32 if dtype == torch.float32 else torch.float16
    is_int8 = dtype == torch.int8
    q, k = (make.codes(*shape) if is_int8 else make.floats(*shape, dtype=dtype) for _ in range(2))
    v, out = make.floats(*shape, dtype=values), make.empty(*shape, dtype=values)
    scale = 0.02 if is_int8 else 1.0
    scores = attention.Scores(dimension**-0.5, query_scale=scale, key_scale=scale)
    bound = Bound(1e-4, 1e-5) if values == torch.float32 else Bound(2e-3, 2e-3)
    bias = make.floats(heads, 2 * length - 1) if biased else None
    launch = attention.launch((q, k, v), start, [length] * sequences, scores, out, bias)
    return Case(launch, (out,), lambda: (references.attention(q, k, v, start, scores, bias),), bound)


def qkv_case(make: Maker, rows: int, heads: qkv.Heads, inputs: int, turned: bool) -> Case:
    """A projection with bias, the input with a scale per token."""
    codes, scale, weight = make.codes(rows, inputs), make.scales(rows, 1, around=INPUT_SCALE), make.weight(heads.outputs, inputs)
    q, k, v = (make.empty(rows, count, heads.dimension, dtype=dtype) for count, dtype in heads.types())
    half = heads.dimension // 2
    rotary = qkv.Rotary(make.floats(rows, half), make.floats(rows, half)) if turned else None
    launch = qkv.launch(codes, scale, weight, heads, rotary, (q, k, v))
    return Case(launch, (q, k, v), lambda: references.qkv(codes, scale, weight, heads, rotary), HALF if turned else Bound())


def token_case(make: Maker, rows: int, inputs: int) -> Case:
    """Codes with a scale per token."""
    x, codes, scale = make.halves(rows, inputs), make.empty(rows, inputs, dtype=torch.int8), make.empty(rows, 1)
    return Case(quantize.token_launch(x, codes, scale), (codes, scale), lambda: references.quantized_tokens(x))


def gated_case(make: Maker, rows: int, outputs: int, inputs: int, activation: Activation = "silu") -> Case:
    """Gate and up of Llama, or of T5 with the tanh form of GELU; the input with a scale per token, the output in codes."""
    codes, scale = make.codes(rows, inputs), make.scales(rows, 1, around=INPUT_SCALE)
    gate, up, output = make.weight(outputs, inputs), make.weight(outputs, inputs), Output(activation, scale=0.1)
    out = make.empty(rows, outputs, dtype=torch.int8)
    launch = gated.launch(codes, scale, gate, up, output, out)
    return Case(launch, (out,), lambda: (references.gated(codes, scale, gate, up, output),), HALF)


def pooling_case(make: Maker, sequences: int, length: int, inputs: int) -> Case:
    """The mean of the tokens of each sequence, in float16."""
    x, start, out = make.halves(sequences * length, inputs), make.starts(sequences, length), make.empty(sequences, inputs)
    launch = pooling.launch(x, start, "mean", out)
    return Case(launch, (out,), lambda: (references.pooled(x, start, "mean").float(),), Bound(1e-5, 1e-5))


def causal_case(make: Maker, sequences: int, length: int, heads: tuple[int, int], dimension: int) -> Case:
    """Causal attention over sequences of one length, heads of keys shared, in float16."""
    start = make.starts(sequences, length)
    q, k, v = (make.halves(sequences * length, count, dimension) for count in (heads[0], heads[1], heads[1]))
    out, scores = make.empty(*q.shape, dtype=torch.float16), attention.Scores(dimension**-0.5, causal=True)
    launch = attention.launch((q, k, v), start, [length] * sequences, scores, out)
    return Case(launch, (out,), lambda: (references.attention(q, k, v, start, scores),), Bound(2e-3, 2e-3))


def paged_case(make: Maker, texts: int, length: int, heads: tuple[int, int], dimension: int, dtype: torch.dtype) -> Case:
    """One new token of each text, behind `length` - 1 others, on pages of 16; where there are several spans, the kernel of one span."""
    q, scaling = make.floats(texts, heads[0], dimension, dtype=dtype), dimension**-0.5
    pages = paged_keys(make, texts, length, heads[1], dimension, dtype)
    out = make.empty(*q.shape, dtype=dtype)
    launch = paged_attention.launches(q, pages, scaling, out)[0]
    bound = Bound(1e-4, 1e-5) if dtype == torch.float32 else Bound(2e-3, 2e-3)
    return Case(launch, (out,), lambda: (references.attention_to_pages(q, pages, scaling),), bound)


def combining_case(make: Maker, texts: int, length: int, heads: int, dimension: int) -> Case:
    """What adds the spans of `paged_case` up, in float16; its parts are made by the kernel of a span, where kernels run."""
    q = make.halves(texts, heads, dimension)
    pages, out = paged_keys(make, texts, length, heads, dimension, torch.float16), make.empty(texts, heads, dimension, dtype=torch.float16)
    first, second = paged_attention.launches(q, pages, dimension**-0.5, out)
    if make.device.type == "cuda" or (not make.is_meta and INTERPRETED.value):
        first.run()
    return Case(second, (out,), lambda: (references.attention_to_pages(q, pages, dimension**-0.5),), Bound(2e-3, 2e-3))


def paged_keys(make: Maker, texts: int, length: int, heads: int, dimension: int, dtype: torch.dtype) -> Pages:
    """Returns keys and values of texts of one length, on pages in the order of a permutation."""
    slots = 16
    width = -(-length // slots)
    keys, values = (make.floats(texts * width, slots, heads, dimension, dtype=dtype) for _ in range(2))
    table, numbers = make.empty(texts, width, dtype=torch.int32), make.empty(texts, dtype=torch.int32)
    if not make.is_meta:
        order = torch.arange(texts * width, dtype=torch.int32).flip(0).reshape(texts, width)
        table, numbers = order.to(make.device), torch.arange(texts, dtype=torch.int32, device=make.device)
    return Pages(keys, values, table, numbers, torch.full_like(numbers, length))


def fifth_case(make: Maker, outputs: int, inputs: int, side: int) -> Case:
    """A block-sparse GEMM of 4096 rows with 80 % of its blocks zero."""
    return sparse_case(make, 4096, outputs, inputs, side, round(LEFT * (outputs // side) * (inputs // side)))


CASES: dict[str, Make] = {
    "quantize per tensor, 4096 x 768": lambda make: tensor_case(make, 4096, 768),
    "int8 GEMM + GELU + requantize, 4096 x 3072 x 768": lambda make: gemm_case(make, 4096, 3072, 768, Output("gelu", scale=0.1)),
    "int8 GEMM, 4096 x 768 x 3072": lambda make: gemm_case(make, 4096, 768, 3072, Output()),
    "int8 GEMM, 64 x 768 x 3072": lambda make: gemm_case(make, 64, 768, 3072, Output()),
    "int8 GEMM + SiLU, 16 x 14336 x 4096": lambda make: gemm_case(make, 16, 14336, 4096, Output("silu")),
    "residual + LayerNorm + quantize, 4096 x 768": lambda make: norm_case(make, 4096, 768, True),
    "embedding + LayerNorm + quantize, 4096 x 768": lambda make: embedding_case(make, 4096, 768),
    "residual + RMSNorm + quantize, 16 x 4096": lambda make: norm_case(make, 16, 4096, False),
    "block-sparse GEMM 64, a quarter left, 4096 x 768 x 3072": lambda make: sparse_case(make, 4096, 768, 3072, 64, 144),
    "block-sparse GEMM 32, a quarter left, 4096 x 768 x 3072": lambda make: sparse_case(make, 4096, 768, 3072, 32, 576),
    "block-sparse GEMM 64, a quarter left, 16 x 768 x 3072": lambda make: sparse_case(make, 16, 768, 3072, 64, 144),
    "w4a16 GEMM, groups of 128, 1 x 14336 x 4096": lambda make: w4a16_case(make, 1, 14336, 4096, 128),
    "w4a16 GEMM, groups of 32, 16 x 14336 x 4096": lambda make: w4a16_case(make, 16, 14336, 4096, 32),
    "packed attention, float16, 32 of 128 rows, 12 x 64": lambda make: attention_case(make, 32, 128, 12, 64, torch.float16),
    "packed attention, float32, 32 of 128 rows, 12 x 64": lambda make: attention_case(make, 32, 128, 12, 64, torch.float32),
    "packed attention, float32, 8 of 512 rows, 12 x 128": lambda make: attention_case(make, 8, 512, 12, 128, torch.float32),
    "packed attention, int8 QK, 32 of 128 rows, 12 x 64": lambda make: attention_case(make, 32, 128, 12, 64, torch.int8),
    "packed attention, int8 QK, 8 of 2048 rows, 32 x 128": lambda make: attention_case(make, 8, 2048, 32, 128, torch.int8),
    "int8 QKV, 4096 x 768, 12 x 64": lambda make: qkv_case(make, 4096, qkv.Heads(12, 12, 64), 768, False),
    "int8 QKV + rotary, QK in int8, 4096 x 4096, 32 + 8 x 128": lambda make: qkv_case(
        make, 4096, qkv.Heads(32, 8, 128, 0.1, 0.1), 4096, True
    ),
    "int8 QKV + rotary, QK in int8, 16 x 4096, 32 + 8 x 128": lambda make: qkv_case(make, 16, qkv.Heads(32, 8, 128, 0.1, 0.1), 4096, True),
}
"""By their row in the table."""
LARGE: dict[str, Make] = {
    "int8 QKV, 4096 x 1024, 16 x 64": lambda make: qkv_case(make, 4096, qkv.Heads(16, 16, 64), 1024, False),
    "int8 GEMM, 4096 x 1024 x 1024": lambda make: gemm_case(make, 4096, 1024, 1024, Output()),
    "int8 GEMM + GELU + requantize, 4096 x 4096 x 1024": lambda make: gemm_case(make, 4096, 4096, 1024, Output("gelu", scale=0.1)),
    "int8 GEMM, 4096 x 1024 x 4096": lambda make: gemm_case(make, 4096, 1024, 4096, Output()),
    "packed attention, float16, 32 of 128 rows, 16 x 64": lambda make: attention_case(make, 32, 128, 16, 64, torch.float16),
    "packed attention, float16, 32 of 384 rows, 16 x 64": lambda make: attention_case(make, 32, 384, 16, 64, torch.float16),
    **{
        f"block-sparse GEMM {side}, a fifth left, 4096 x {outputs} x {inputs}": partial(
            fifth_case, outputs=outputs, inputs=inputs, side=side
        )
        for outputs, inputs in ((4096, 1024), (1024, 4096), (4096, 4096))
        for side in block_sparse.SIDES
    },
    "int8 GEMM, 4096 x 4096 x 4096": lambda make: gemm_case(make, 4096, 4096, 4096, Output()),
}
"""BERT-large; and a square product beside its block-sparse one."""
DECODERS: dict[str, Make] = {
    "int8 GEMM + tanh GELU + requantize, 4096 x 3072 x 768": lambda make: gemm_case(make, 4096, 3072, 768, Output("gelu_tanh", scale=0.1)),
    "causal attention, float16, 4 of 1024 rows, 12 x 64": lambda make: causal_case(make, 4, 1024, (12, 12), 64),
    "causal attention, float16, 2 of 2048 rows, 9 + 3 x 64": lambda make: causal_case(make, 2, 2048, (9, 3), 64),
    "attention to pages, float16, 8 of 1024, 12 x 64": lambda make: paged_case(make, 8, 1024, (12, 12), 64, torch.float16),
    "attention to pages, float16, 8 of 2048, 9 + 3 x 64": lambda make: paged_case(make, 8, 2048, (9, 3), 64, torch.float16),
    "attention to pages, float16, 8 of 8192, 32 + 8 x 128": lambda make: paged_case(make, 8, 8192, (32, 8), 128, torch.float16),
    "attention to pages, float32, 8 of 8192, 32 + 8 x 128": lambda make: paged_case(make, 8, 8192, (32, 8), 128, torch.float32),
    "attention to pages, spans combined, 8 of 1024, 12 x 64": lambda make: combining_case(make, 8, 1024, 12, 64),
    "int8 gate and up + SiLU + requantize, 4096 x 1536 x 576": lambda make: gated_case(make, 4096, 1536, 576),
    "int8 gate and up + SiLU + requantize, 4096 x 14336 x 4096": lambda make: gated_case(make, 4096, 14336, 4096),
    "int8 gate and up + SiLU + requantize, 16 x 14336 x 4096": lambda make: gated_case(make, 16, 14336, 4096),
    "w8a16 GEMM, 8 x 50257 x 768": lambda make: w8a16_case(make, 8, 50257, 768),
    "quantize per token, 16 x 14336": lambda make: token_case(make, 16, 14336),
    "int8 QKV, 8 x 768, 8 x 96": lambda make: qkv_case(make, 8, qkv.Heads(8, 8, 96), 768, False),
}
"""GPT-2, SmolLM2-135M and Llama-3-8B: texts that are read, and 8 or 16 of which each gets a token."""
EMBEDDERS: dict[str, Make] = {
    "int8 GEMM + ReLU + requantize, 4096 x 3072 x 768": lambda make: gemm_case(make, 4096, 3072, 768, Output("relu", scale=0.1)),
    "int8 gate and up + tanh GELU + requantize, 4096 x 2048 x 768": lambda make: gated_case(make, 4096, 2048, 768, "gelu_tanh"),
    "residual + RMSNorm + quantize, 4096 x 768": lambda make: norm_case(make, 4096, 768, False),
    "packed attention, bias of distances, float16, 32 of 128 rows, 12 x 64": lambda make: attention_case(
        make, 32, 128, 12, 64, torch.float16, True
    ),
    "mean of tokens, 32 of 128 rows, 768": lambda make: pooling_case(make, 32, 128, 768),
}
"""T5 and T5 v1.1 in the size base, as embedders."""
EVERY = {**CASES, **LARGE, **DECODERS, **EMBEDDERS}
SMALL: dict[str, Make] = {
    "quantize per tensor": lambda make: tensor_case(make, 3, 70),
    "int8 GEMM": lambda make: gemm_case(make, 20, 70, 96, Output()),
    "int8 GEMM + GELU + requantize": lambda make: gemm_case(make, 20, 70, 40, Output("gelu", scale=0.1)),
    "residual + LayerNorm + quantize": lambda make: norm_case(make, 3, 70, True),
    "residual + RMSNorm + quantize": lambda make: norm_case(make, 3, 70, False),
    "embedding + LayerNorm + quantize": lambda make: embedding_case(make, 5, 70, 50),
    "block-sparse GEMM 64": lambda make: sparse_case(make, 20, 128, 192, 64, 3),
    "block-sparse GEMM 32": lambda make: sparse_case(make, 20, 64, 96, 32, 3),
    "w4a16 GEMM": lambda make: w4a16_case(make, 3, 70, 128, 32),
    "packed attention, float16": lambda make: attention_case(make, 2, 9, 2, 32, torch.float16),
    "packed attention, float32": lambda make: attention_case(make, 2, 9, 2, 32, torch.float32),
    "packed attention, int8 QK": lambda make: attention_case(make, 2, 9, 2, 32, torch.int8),
    "packed attention, bias of distances": lambda make: attention_case(make, 2, 9, 2, 32, torch.float16, True),
    "int8 QKV": lambda make: qkv_case(make, 5, qkv.Heads(2, 2, 32), 96, False),
    "int8 QKV + rotary, QK in int8": lambda make: qkv_case(make, 5, qkv.Heads(2, 1, 32, 0.1, 0.1), 96, True),
    "int8 GEMM + tanh GELU + requantize": lambda make: gemm_case(make, 20, 70, 40, Output("gelu_tanh", scale=0.1)),
    "causal attention, float16": lambda make: causal_case(make, 2, 9, (4, 2), 32),
    "attention to pages, float16": lambda make: paged_case(make, 2, 19, (4, 2), 32, torch.float16),
    "attention to pages, float32": lambda make: paged_case(make, 2, 19, (4, 2), 32, torch.float32),
    "attention to pages, spans combined": lambda make: combining_case(make, 1, 270, 1, 32),
    "int8 gate and up + SiLU + requantize": lambda make: gated_case(make, 20, 70, 40),
    "int8 GEMM + ReLU + requantize": lambda make: gemm_case(make, 20, 70, 40, Output("relu", scale=0.1)),
    "int8 gate and up + tanh GELU + requantize": lambda make: gated_case(make, 20, 70, 40, "gelu_tanh"),
    "mean of tokens": lambda make: pooling_case(make, 3, 9, 70),
    "w8a16 GEMM": lambda make: w8a16_case(make, 3, 70, 128),
    "quantize per token": lambda make: token_case(make, 3, 70),
}
"""For checks."""
