"""Embedding lookup, LayerNorm and quantization, in one pass over each token: what a BERT encoder begins with.

    h = (word[id] + type[type id]) + position[position id]         in float32, in the order of Transformers' BERT
    z = LayerNorm(h)                                               see `norm`
    codes and kept z as in `norm`

h equals torch's to the bit; z and the codes have the bounds that `norm` states.

Ids are checked before the launch, which reads the smallest and the largest back from the device: an id beyond its table would read memory
of others. Left out: tables in int8.

Shape suffixes: N tokens, I inputs, V rows of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels import norm as norms
from export.kernels.launch import Cost, Launch, bytes_of, check_scale, check_tensor, power_of_two
from export.kernels.norm import Norm, normalized, stored_codes
from export.kernels.quantize import FLOATS
from foundation.core.errors import InputError

Lookup = tuple[Tensor, Tensor]
"""Ids int64 [N], and the table [V, I] that they are rows of."""


def embed_quantize(word: Lookup, kind: Lookup, position: Lookup, norm: Norm, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes, their scales, and the normalized embeddings.

    Args:
        word: Token ids and their table: float32, float16 or bfloat16, contiguous.
        kind: Token type ids and their table, of the same type.
        position: Position ids and their table, of the same type.
        norm: Gain, bias and eps.
        scale: Scale of the codes; None computes one per token.

    Returns:
        int8 `[N, I]`; float32 `[N, 1]`, or `[]` for a given scale; `[N, I]` in the type of the tables.

    Raises:
        InputError: Shapes or types do not fit, an id is beyond its table, or the scale is not positive.
    """
    (tokens,), inputs, dtype = word[0].shape, len(norm.gain), word[1].dtype
    for name, (id_N, table_VI) in {"word": word, "type": kind, "position": position}.items():
        check_tensor(f"{name} ids", id_N, (tokens,), torch.int64)
        check_tensor(f"{name} table", table_VI, (-1, inputs), *((dtype,) if dtype in FLOATS else FLOATS))
        if tokens and (int(id_N.min()) < 0 or int(id_N.max()) >= len(table_VI)):
            raise InputError(f"{name} ids must be 0 to {len(table_VI) - 1}; they are {int(id_N.min())} to {int(id_N.max())}")
    if scale is not None:
        check_scale("scale", scale)
    device = word[1].device
    scales = torch.empty(tokens, 1, device=device) if scale is None else torch.tensor(scale, device=device)
    codes_NI, kept_NI = (torch.empty(tokens, inputs, dtype=stored, device=device) for stored in (torch.int8, dtype))
    launch((word, kind, position), norm, codes_NI, scales if scale is None else scale, kept_NI).run()
    return codes_NI, scales, kept_NI


def launch(lookups: tuple[Lookup, Lookup, Lookup], norm: Norm, codes_NI: Tensor | None, scale: float | Tensor, kept_NI: Tensor) -> Launch:
    """Returns the launch behind `embed_quantize`; a tensor as scale is written, a number is read; without codes nothing is quantized."""
    (word_id, word), (kind_id, kind), (position_id, position) = lookups
    (tokens, inputs), scales_N = kept_NI.shape, scale if isinstance(scale, Tensor) else None
    arguments = {
        "word_id": word_id, "word": word, "kind_id": kind_id, "kind": kind, "position_id": position_id, "position": position,
        "gain": norm.gain, "bias": norm.bias, "eps": norm.eps,
        "codes": codes_NI, "scales": scales_N, "scale": 1.0 if isinstance(scale, Tensor) else scale, "kept": kept_NI,
        "inputs": inputs, "length": float(inputs), "CENTRED": norm.centred, "BLOCK": power_of_two(inputs),
    }  # fmt: skip
    read = bytes_of(word_id, kind_id, position_id, norm.gain, norm.bias) + 3 * tokens * inputs * word.element_size()  # no row twice
    cost = Cost(read + bytes_of(codes_NI, scales_N, kept_NI), (norms.OPERATIONS + 1) * tokens * inputs, "fp32")
    return Launch(embed_quantize_kernel, (tokens,), arguments, cost, norms.warps(inputs))


@triton.jit
def embed_quantize_kernel(
    word_id: tl.pointer_type, word: tl.pointer_type, kind_id: tl.pointer_type, kind: tl.pointer_type,
    position_id: tl.pointer_type, position: tl.pointer_type, gain: tl.pointer_type, bias: tl.pointer_type, eps: tl.tensor,
    codes: tl.pointer_type, scales: tl.pointer_type, scale: tl.tensor, kept: tl.pointer_type,
    inputs: tl.tensor, length: tl.tensor, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program, one token."""
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first, inside = token * inputs, at < inputs
    h = tl.load(word + tl.load(word_id + token) * inputs + at, inside, other=0.0).to(tl.float32)
    h += tl.load(kind + tl.load(kind_id + token) * inputs + at, inside, other=0.0).to(tl.float32)
    h += tl.load(position + tl.load(position_id + token) * inputs + at, inside, other=0.0).to(tl.float32)
    z = normalized(h, at, inputs, length, gain, bias, eps, CENTRED)
    tl.store(kept + first + at, z.to(kept.dtype.element_ty), inside)
    stored_codes(z, at, inputs, codes if codes is None else codes + first, scales if scales is None else scales + token, scale)


def summed(word: Lookup, kind: Lookup, position: Lookup) -> Tensor:
    """Returns h, float32 `[N, I]`, in torch."""
    (word_id, words), (kind_id, kinds), (position_id, positions) = word, kind, position
    return words[word_id].float() + kinds[kind_id].float() + positions[position_id].float()


def reference(word: Lookup, kind: Lookup, position: Lookup, norm: Norm, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `embed_quantize` returns, in torch."""
    codes_NI, scales, kept_NI = norms.reference(summed(word, kind, position), None, norm, scale, "norm")
    return codes_NI, scales, kept_NI.to(word[1].dtype)
