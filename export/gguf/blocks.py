"""Weights in the block formats of GGUF: 32 weights of a row share a float16 scale d.

    Q8_0    w = d q              q int8 [-127, 127]      2 + 32 bytes
    Q4_0    w = d (u - 8)        u 4 bits                2 + 16 bytes
    Q4_1    w = d u + m          u 4 bits, m float16     4 + 16 bytes
    Q4_K    w = d a u - e b      256 weights share d, e  `export.gguf.k_blocks`

Byte j of the 16 holds u_j in its low half and u_{j + 16} in its high half. Our schemes have the same grids, with float32 scales s that
more weights share:

    w8a16, w8a8, w8a8-dynamic, int8 rows    s q         one s a row                Q8_0
    w4a16                                   s q         one s for g inputs         Q4_0, u = q + 8
    w4a16, zero points                      s (q - z)   one s and z for g inputs   Q4_1, u = q + 8, m = -d (z + 8)
    w4a16, k_quant                          s u - m     one s and m for g inputs   Q4_K where rows have whole blocks of 256, else Q4_1

so that a block takes our codes as they are, with d = float16(s), where g is a multiple of 32 and every row has whole blocks. Each weight
moves by at most 2^-11 of the largest one of its row; a scale for which this does not hold (too small or too large for float16) takes the
matrix out. m is rounded to float16 too: a weight of 0 is then up to 0.004 d. Two-level scales and offsets are float16 numbers already: they
are stored as they are, and programs read the very numbers of the run, but for the m of zero points.

What does not fit is rounded again to Q8_0, or is written as floats where rows have no whole blocks.

Source: ggml-quants.c of llama.cpp; `gguf.quants` is its reference in NumPy.

Shape suffixes: O outputs, I inputs, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export.gguf.k_blocks import WIDTH, k_blocks
from foundation.schemes.int4 import LOW, Int4Scales
from foundation.schemes.int8 import DynamicScales, LayerScales
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.scales import Scales
from foundation.schemes.two_level import of_groups

BLOCK = 32
"""Weights that share a scale."""
MOST_SHIFT = 2.0**-11
"""Largest move of a weight for a float16 scale, as a share of the largest weight of its row; every normal float16 number is within."""
LARGEST_HALF = 65504.0
Floats = Literal["F16", "F32"]
Kind = Literal["F16", "F32", "Q8_0", "Q4_0", "Q4_1", "Q4_K"]
Origin = Literal["codes", "rounded", "float"]


@dataclass(frozen=True)
class Encoded:
    """A tensor as GGUF stores it."""

    data: NDArray[np.generic]
    """float32 or float16 of the tensor's shape; uint8 [O, bytes of a row] for blocks."""
    kind: Kind
    """The format."""
    origin: Origin
    """codes: the integers of the checkpoint; rounded: a quantized matrix that was rounded again; float: never quantized."""
    reason: str = ""
    """Why a quantized matrix was rounded again."""
    scales: int = 0
    """Scales that the blocks hold."""
    changed_scales: int = 0
    """Scales that float16 does not hold exactly."""
    largest_change: float = 0.0
    """Largest relative change of a scale by float16."""


class Codes(NamedTuple):
    """Integers of a matrix, and what they stand for: scale * (code - zero)."""

    kind: Kind
    code_OI: Tensor
    """int8: [-127, 127] for Q8_0, [0, 15] for the others."""
    scale_OB: Tensor
    """float32."""
    zero_OB: Tensor
    """The code of 0, int8: 0 for Q8_0 and with offsets, 8 for Q4_0."""
    offset_OB: Tensor | None = None
    """m of K-quants, float32; None without."""
    shared: tuple[Tensor, Tensor] | None = None
    """d and e of the blocks of 256, for Q4_K alone."""

    def rows(self, order_O: Tensor) -> Codes:
        """Returns the rows in another order."""
        offset_OB = None if self.offset_OB is None else self.offset_OB[order_O]
        shared = None if self.shared is None else (self.shared[0][order_O], self.shared[1][order_O])
        return Codes(self.kind, self.code_OI[order_O], self.scale_OB[order_O], self.zero_OB[order_O], offset_OB, shared)


def encode(weight: Tensor, scales: Scales | Tensor | None, floats: Floats, order_O: Tensor | None = None) -> Encoded:
    """Returns a weight as GGUF stores it.

    Args:
        weight: Float, as the checkpoint stores it: on the grid of its scales.
        scales: Scales of a quantized layer, or of the rows of a table, float32 [V]; None for a float tensor.
        floats: Format of what no block format holds. Vectors and numbers beyond float16 are F32 all the same.
        order_O: Order of the rows; None: as they are.
    """
    weight = weight.float()
    if scales is None:
        return _floats(weight if order_O is None else weight[order_O], floats, "float")
    codes = codes_of(weight, scales)
    if order_O is not None:
        weight = weight[order_O]
        codes = codes if isinstance(codes, str) else codes.rows(order_O)
    reason = codes if isinstance(codes, str) else misfit(codes)
    if reason is None:
        assert isinstance(codes, Codes)
        return blocks(codes)
    if isinstance(codes, Codes) or weight.shape[1] % BLOCK or isinstance(scales, Tensor) or not _is_integer(scales):
        return _floats(weight, floats, "rounded", reason)
    from gguf.quants import Q8_0

    return Encoded(Q8_0.quantize(weight.numpy()), "Q8_0", "rounded", reason)


def codes_of(weight_OI: Tensor, scales: Scales | Tensor) -> Codes | str:
    """Returns the integers of a matrix in the format that has its grid, or why none has."""
    outputs, inputs = weight_OI.shape
    if inputs % BLOCK:
        return f"rows of {inputs} have no whole blocks of {BLOCK}"
    shape = (outputs, inputs // BLOCK)
    match scales:
        case Tensor():
            from foundation.schemes.tables import table_codes

            return _rowwise(table_codes(weight_OI, scales), scales, shape)
        case LayerScales() | DynamicScales() if scales.input_smooth is not None:
            return "a smoothing vector gives every input a step of its own"
        case LayerScales() | DynamicScales() | WeightScales():
            return _rowwise(scales.codes(weight_OI), scales.weight_scale, shape)
        case Int4Scales():
            return _grouped(weight_OI, scales, shape)
    return f"no format has the numbers of {scales.SCHEME}"


def _rowwise(code_OI: Tensor, scale_O: Tensor, shape: tuple[int, int]) -> Codes:
    return Codes("Q8_0", code_OI, scale_O[:, None].expand(shape), torch.zeros(shape, dtype=torch.int8))


def _grouped(weight_OI: Tensor, scales: Int4Scales, shape: tuple[int, int]) -> Codes | str:
    if scales.group_size % BLOCK:
        return f"groups of {scales.group_size} are no whole blocks of {BLOCK}"

    def by_block(value_OG: Tensor) -> Tensor:
        return value_OG.repeat_interleave(scales.group_size // BLOCK, dim=1)[:, : shape[1]]

    if scales.weight_offset is not None:
        return _k_quant(weight_OI, scales, by_block)
    zero = scales.weight_zero_point
    zero_OB = torch.full(shape, -LOW, dtype=torch.int8) if zero is None else by_block(zero) - LOW
    return Codes("Q4_0" if zero is None else "Q4_1", scales.codes(weight_OI) - LOW, by_block(scales.weight_scale), zero_OB)


def _k_quant(weight_OI: Tensor, scales: Int4Scales, by_block: Callable[[Tensor], Tensor]) -> Codes:
    """Returns the integers of K-quants: in Q4_K if rows have whole blocks of it, else in Q4_1."""
    offset, supers = scales.weight_offset, (scales.weight_super_scale, scales.weight_super_offset)
    assert offset is not None, "a K-quant"
    scale_OB, offset_OB = by_block(scales.weight_scale), by_block(offset)
    zero_OB, code_OI = torch.zeros_like(scale_OB, dtype=torch.int8), scales.codes(weight_OI) - LOW
    if weight_OI.shape[1] % WIDTH or supers[0] is None or supers[1] is None:
        return Codes("Q4_1", code_OI, scale_OB, zero_OB, offset_OB)
    groups, step = scales.weight_scale.shape[1], WIDTH // BLOCK  # a super-block is as wide as one block of 256, or several
    d, e = (by_block(of_groups(shared_OS, groups))[:, ::step] for shared_OS in (supers[0], supers[1]))
    return Codes("Q4_K", code_OI, scale_OB, zero_OB, offset_OB, (d, e))


def misfit(codes: Codes) -> str | None:
    """Returns why float16 cannot hold the scales of a matrix; None where it can."""
    largest_OB = (_by_block(codes.code_OI).int() - codes.zero_OB[..., None].int()).abs().amax(dim=2)
    shift_OB = (codes.scale_OB.half().float() - codes.scale_OB).abs() * largest_OB
    row_O1 = (codes.scale_OB * largest_OB).amax(dim=1, keepdim=True)
    return None if bool((shift_OB <= MOST_SHIFT * row_O1).all()) else "float16 does not hold its scales"


def blocks(codes: Codes) -> Encoded:
    """Returns the blocks of a matrix."""
    if codes.shared is not None:
        assert codes.offset_OB is not None, "Q4_K has offsets"
        found = k_blocks(codes.code_OI, codes.scale_OB, codes.offset_OB, codes.shared)
        return Encoded(found, "Q4_K", "codes", scales=codes.scale_OB.numel())
    half_OB = codes.scale_OB.half()
    parts = [_bytes(half_OB)]
    if codes.kind == "Q4_1":
        offset_OB = half_OB.float() * codes.zero_OB.float() if codes.offset_OB is None else codes.offset_OB
        parts.append(_bytes((-offset_OB).half()))
    code_OBb: NDArray[np.uint8] = _by_block(codes.code_OI).numpy().view(np.uint8)
    halves: NDArray[np.uint8] = code_OBb[..., : BLOCK // 2] | code_OBb[..., BLOCK // 2 :] << np.uint8(4)
    parts.append(code_OBb if codes.kind == "Q8_0" else halves)
    data = np.concatenate(parts, axis=2)
    change_OB = (half_OB.float() - codes.scale_OB).abs()
    return Encoded(
        data.reshape(len(data), -1),
        codes.kind,
        "codes",
        scales=half_OB.numel(),
        changed_scales=int((change_OB > 0).sum()),
        largest_change=float((change_OB / codes.scale_OB).max()),
    )


def _by_block(code_OI: Tensor) -> Tensor:
    return code_OI.reshape(len(code_OI), -1, BLOCK)


def _bytes(half_OB: Tensor) -> NDArray[np.uint8]:
    """Returns float16 numbers as bytes, uint8 [O, B, 2]."""
    return half_OB.contiguous().numpy().astype("<f2")[..., None].view(np.uint8)


def _is_integer(scales: Scales) -> bool:
    from foundation.schemes.table import facts_of

    return facts_of(scales).integer


def _floats(weight: Tensor, floats: Floats, origin: Origin, reason: str = "") -> Encoded:
    small = weight.ndim > 1 and floats == "F16" and bool((weight.abs() <= LARGEST_HALF).all())
    return Encoded((weight.half() if small else weight).contiguous().numpy(), "F16" if small else "F32", origin, reason)
