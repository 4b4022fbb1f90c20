"""Embedding lookup, norm and quantization, in one pass over each token: what an encoder or a decoder begins with.

    h = (word[id] + type[type id]) + position[position id]         in float32, in the order of Transformers' BERT; types and positions
                                                                   only where a model has them
    z = LayerNorm(h) or RMSNorm(h)                                 see `norm`
    codes and kept h or z as in `norm`

h equals torch's to the bit; z and the codes have the bounds that `norm` states.

Ids have to be rows of their tables: an id beyond a table reads memory of others. Left out: tables of types and positions in int8.

Shape suffixes: N tokens, I inputs, V rows of a table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from export.kernels import norm as norms
from export.kernels.dependent_launch import wait_for_inputs
from export.kernels.launch import Cost, Launch, bytes_of, check_step, power_of_two
from export.kernels.norm import Keep, Norm, normalized, stored_codes

Lookup = tuple[Tensor, Tensor]
"""Ids int64 [N], and the table [V, I] that they are rows of."""


def launch(
    lookups: tuple[Lookup, Lookup | None, Lookup | None],
    norm: Norm,
    codes_NI: Tensor | None,
    scale: float | Tensor,
    kept_NI: Tensor,
    keep: Keep = "norm",
    word_scale_V: Tensor | None = None,
) -> Launch:
    """Returns the launch of a lookup; a tensor as scale is written, a number is read; without codes nothing is quantized.

    Args:
        lookups: Ids and tables of tokens, token types and positions, None for what a model does not have; the tables have one type,
            float32, float16 or bfloat16, unless the words are int8.
        norm: Gain, bias and eps.
        codes_NI: Takes the codes, int8.
        scale: Scale of the codes; float32 `[N, 1]` takes one for each token.
        kept_NI: Takes what is kept, in the type of the tables.
        keep: "sum" keeps h, "norm" keeps z.
        word_scale_V: Scales of a table of words in int8 codes, float32 `[V]`: word[v] = s[v] q[v]; None for a float table.
    """
    (word_id, word), (kind_id, kind), (position_id, position) = (lookup or (None, None) for lookup in lookups)
    assert word is not None, "a model has words"
    (tokens, inputs), scales_N = kept_NI.shape, scale if isinstance(scale, Tensor) else None
    if not isinstance(scale, Tensor):
        check_step("scale", scale)
    arguments = {
        "word_id": word_id, "word": word, "word_scale": word_scale_V, "kind_id": kind_id, "kind": kind,
        "position_id": position_id, "position": position,
        "gain": norm.gain, "bias": norm.bias, "eps": norm.eps,
        "codes": codes_NI, "scales": scales_N, "scale": 1.0 if isinstance(scale, Tensor) else scale, "kept": kept_NI,
        "inputs": inputs, "length": float(inputs), "CENTRED": norm.centred, "KEEP": keep, "BLOCK": power_of_two(inputs),
    }  # fmt: skip
    rows = sum(lookup is not None for lookup in lookups) * tokens  # no row twice
    read = bytes_of(word_id, kind_id, position_id, norm.gain, norm.bias) + rows * inputs * word.element_size() + bytes_of(word_scale_V)
    cost = Cost(read + bytes_of(codes_NI, scales_N, kept_NI), (norms.OPERATIONS + 1) * tokens * inputs, "fp32")
    return Launch(embed_quantize_kernel, (tokens,), arguments, cost, norms.warps(inputs))


@triton.jit
def embed_quantize_kernel(
    word_id: tl.pointer_type, word: tl.pointer_type, word_scale: tl.pointer_type, kind_id: tl.pointer_type, kind: tl.pointer_type,
    position_id: tl.pointer_type, position: tl.pointer_type, gain: tl.pointer_type, bias: tl.pointer_type, eps: tl.tensor,
    codes: tl.pointer_type, scales: tl.pointer_type, scale: tl.tensor, kept: tl.pointer_type,
    inputs: tl.tensor, length: tl.tensor, CENTRED: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, one token."""
    wait_for_inputs(DEPENDENT)
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first, inside = token * inputs, at < inputs
    id = tl.load(word_id + token)
    h = tl.load(word + id * inputs + at, inside, other=0).to(tl.float32)
    if word_scale is not None:
        h *= tl.load(word_scale + id)
    if kind is not None:
        h += tl.load(kind + tl.load(kind_id + token) * inputs + at, inside, other=0.0).to(tl.float32)
    if position is not None:
        h += tl.load(position + tl.load(position_id + token) * inputs + at, inside, other=0.0).to(tl.float32)
    z = normalized(h, at, inputs, length, gain, bias, eps, CENTRED)
    if KEEP == "sum":
        tl.store(kept + first + at, h.to(kept.dtype.element_ty), inside)
    else:
        tl.store(kept + first + at, z.to(kept.dtype.element_ty), inside)
    stored_codes(z, at, inputs, codes if codes is None else codes + first, scales if scales is None else scales + token, scale)
