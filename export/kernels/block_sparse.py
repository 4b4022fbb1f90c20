"""Block-sparse int8 GEMM: the blocks of zeros that `prune.sparsify` makes are neither stored nor multiplied.

    z = epilogue(q_x @ q_w.T)      sums in int32 over the blocks that are left, exact; see `epilogue`

Storage of a weight [O, I] in blocks of b x b, S = ceil(O / b) by T = ceil(I / b), b = 64 or 32 (Li et al. 2020,
https://arxiv.org/abs/2009.08065):

    bitmap   uint8 [ceil(S T / 8)]      bit s T + t is 1 where block (s, t) is left; the lowest bit of a byte comes first
    codes    int8 [B, b, b]             the blocks that are left, in the order of their bits, [output, input] each

A block at the right or bottom edge is stored whole, with zeros past the end. The bytes are B b^2 + ceil(S T / 8): one bit for 4096 or 1024
codes is the price of sparsity. `Index` is made of the bitmap when a weight is loaded: where each strip of outputs begins among the blocks,
and from which inputs each block reads.

One program computes the outputs of one strip and loops over its blocks. Bound: sums exact, so that the outputs equal the outputs of the
dense kernel of `gemm` to the bit.

Shape suffixes: N rows, I inputs, O outputs, S x T blocks, B blocks left, b side of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from export.kernels.dependent_launch import wait_for_inputs
from export.kernels.epilogue import Output, check_outputs, finished, rescaled
from export.kernels.launch import Cost, Launch, bytes_of, cdiv, check_tensor
from foundation.core.errors import InputError

SIDES = (32, 64)
MOST_ROWS = 128
"""Rows of a tile."""
NUM_STAGES = 7
"""A block's place is loaded before its tile: either takes half of the stages, which leaves three tiles on their way."""


@dataclass(frozen=True)
class Packed:
    """The blocks of an int8 weight that are not all zeros.

    Raises:
        InputError: The codes do not fit the bitmap.
    """

    shape: tuple[int, int]
    """(O, I) of the whole weight."""
    bitmap: Tensor
    """uint8 [ceil(S T / 8)]."""
    codes: Tensor
    """int8 [B, b, b]."""

    def __post_init__(self) -> None:
        side = self.codes.shape[-1]
        if side not in SIDES:
            raise InputError("side", f"{side} given", "blocks with a side of 32 or 64 are allowed")
        check_tensor("bitmap", self.bitmap, (cdiv(cdiv(self.shape[0], side) * cdiv(self.shape[1], side), 8),), torch.uint8)
        check_tensor("codes", self.codes, (-1 if self.bitmap.is_meta else int(self.left().sum()), side, side), torch.int8)

    @property
    def side(self) -> int:
        """Outputs and inputs of a block, b."""
        return self.codes.shape[-1]

    @property
    def size_bytes(self) -> int:
        """Bytes of bitmap and codes."""
        return bytes_of(self.bitmap, self.codes)

    def left(self) -> Tensor:
        """Returns which blocks are left, bool `[S, T]`."""
        strips, columns = cdiv(self.shape[0], self.codes.shape[-1]), cdiv(self.shape[1], self.codes.shape[-1])
        bits = self.bitmap[:, None] >> torch.arange(8, dtype=torch.uint8, device=self.bitmap.device) & 1
        return bits.flatten()[: strips * columns].reshape(strips, columns).bool()


@dataclass(frozen=True)
class Index:
    """Positions of the blocks of a weight."""

    start: Tensor
    """int32 [S + 1]: strip s has the blocks start[s] to start[s + 1] - 1."""
    column: Tensor
    """int32 [B]: t of each block."""


def pack(codes_OI: Tensor, side: int) -> Packed:
    """Returns the blocks with a code other than 0.

    Args:
        codes_OI: int8 `[O, I]`.
        side: 32 or 64.
    """
    check_tensor("codes", codes_OI, (-1, -1), torch.int8)
    if side not in SIDES:
        raise InputError("side", f"{side} given", "blocks with a side of 32 or 64 are allowed")
    outputs, inputs = codes_OI.shape
    padded = torch.nn.functional.pad(codes_OI, (0, -inputs % side, 0, -outputs % side))
    blocks_STbb = padded.reshape(cdiv(outputs, side), side, cdiv(inputs, side), side).transpose(1, 2)
    left_ST = (blocks_STbb != 0).any(dim=3).any(dim=2)
    bits = torch.nn.functional.pad(left_ST.flatten().to(torch.uint8), (0, -left_ST.numel() % 8)).reshape(-1, 8)
    bitmap = (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)
    return Packed((outputs, inputs), bitmap, blocks_STbb[left_ST].contiguous())


def index(packed: Packed) -> Index:
    """Returns where the blocks of a weight belong, from its bitmap."""
    left_ST = packed.left()
    start = torch.nn.functional.pad(left_ST.sum(dim=1).cumsum(0), (1, 0))
    return Index(start.to(torch.int32), left_ST.nonzero()[:, 1].to(torch.int32))


@dataclass(frozen=True)
class SparseWeight:
    """The weight of a block-sparse int8 linear layer; checked once, when it is made."""

    packed: Packed
    index: Index
    scale: Tensor
    """float32 [O]."""
    bias: Tensor | None = None
    """float32 [O]."""

    def __post_init__(self) -> None:
        check_outputs(self.packed.shape[0], self.scale, self.bias)


def launch(x_NI: Tensor, scale: float | Tensor, weight: SparseWeight, output: Output, out_NO: Tensor) -> Launch:
    """Returns the launch of a block-sparse int8 linear layer; arguments as in `gemm.launch`."""
    (rows, inputs), outputs, packed = x_NI.shape, weight.packed.shape[0], weight.packed
    tile_n, scales_N = 16 if rows <= 16 else 64 if rows <= 64 else MOST_ROWS, scale if isinstance(scale, Tensor) else None
    arguments = {
        "x": x_NI, "x_scale": scales_N, "input_scale": 1.0 if isinstance(scale, Tensor) else scale,
        "codes": packed.codes, "start": weight.index.start, "column": weight.index.column,
        "weight_scale": weight.scale, "bias": weight.bias, "out": out_NO, "out_scale": 1.0 if output.scale is None else output.scale,
        "rows": rows, "outputs": outputs, "inputs": inputs, "ACTIVATION": output.activation, "METHOD": output.method,
        "TILE_N": tile_n, "SIDE": packed.side, "EVEN": inputs % packed.side == 0,
    }  # fmt: skip
    num_bytes = packed.size_bytes + bytes_of(x_NI, scales_N, weight.index.start, weight.index.column, weight.scale, weight.bias, out_NO)
    cost = Cost(num_bytes, 2 * rows * packed.codes.numel(), "int8")
    return Launch(block_sparse_gemm_kernel, (cdiv(rows, tile_n), cdiv(outputs, packed.side)), arguments, cost, 4, NUM_STAGES)


@triton.jit
def block_sparse_gemm_kernel(
    x: tl.pointer_type, x_scale: tl.pointer_type, input_scale: tl.tensor,
    codes: tl.pointer_type, start: tl.pointer_type, column: tl.pointer_type,
    weight_scale: tl.pointer_type, bias: tl.pointer_type, out: tl.pointer_type, out_scale: tl.tensor,
    rows: tl.tensor, outputs: tl.tensor, inputs: tl.tensor, ACTIVATION: tl.constexpr, METHOD: tl.constexpr,
    TILE_N: tl.constexpr, SIDE: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """One program, a tile of rows and one strip of outputs."""
    wait_for_inputs(DEPENDENT)
    tile_n, strip = tl.program_id(0), tl.program_id(1)
    n, side = tl.arange(0, TILE_N), tl.arange(0, SIDE)
    first_n = tile_n.to(tl.int64) * TILE_N
    inside_n = tl.minimum(n, rows - 1 - tile_n * TILE_N)  # past the end the last row is read again and not stored
    x_at = x + first_n * inputs + (inside_n[:, None] * inputs + side[None, :])
    first, end = tl.load(start + strip), tl.load(start + strip + 1)
    codes_at = codes + first.to(tl.int64) * (SIDE * SIDE) + (side[None, :] * SIDE + side[:, None])
    sums = tl.zeros((TILE_N, SIDE), tl.int32)
    for block in range(first, end):
        first_i = tl.load(column + block) * SIDE
        weight = tl.load(codes_at)
        codes_at += SIDE * SIDE
        tile = tl.load(x_at + first_i) if EVEN else tl.load(x_at + first_i, first_i + side[None, :] < inputs, other=0)
        sums = tl.dot(tile, weight, sums, out_dtype=tl.int32)
    row, column_o = tile_n * TILE_N + n, strip * SIDE + side
    y = rescaled(sums, row, column_o, rows, outputs, x_scale, input_scale, weight_scale, bias)
    at = first_n * outputs + strip * SIDE + (n[:, None] * outputs + side[None, :])
    finished(y, out, at, (row < rows)[:, None] & (column_o < outputs)[None, :], out_scale, ACTIVATION, METHOD)
