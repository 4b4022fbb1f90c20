"""Blocks of Q4_K, a K-quant of GGUF: 256 weights of a row in 8 groups of 32.

    w = d a u - e b        u 4 bits; a, b 6 bits a group; d, e float16        2 + 2 + 12 + 128 bytes, 4.5 bits a weight

The 12 bytes hold a_j and b_j, j = 0 ... 7:

    bytes j = 0 ... 3      a_j, and above it the 2 high bits of a_{j + 4}
    bytes 4 + j            b_j, and above it the 2 high bits of b_{j + 4}
    bytes 8 + j            the 4 low bits of a_{j + 4}, and above them the 4 low bits of b_{j + 4}

The codes of 64 weights are 32 bytes: byte i has u_i in its low half and u_{i + 32} in its high half.

These are the numbers of `group_scales: k_quant` (`foundation.schemes.two_level`), whose codes, integers a and b, and d and e are stored as
they are. Groups of 64 inputs and more are several groups here, with the same a and b.

Source: block_q4_K of ggml-common.h in llama.cpp; `gguf.quants.Q4_K` reads it in NumPy.

Shape suffixes: O outputs, I inputs, B blocks of 32, K blocks of 256.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foundation.schemes.two_level import LARGEST

WIDTH = 256
"""Weights of a block."""
GROUPS, GROUP = 8, 32
"""Groups of a block, and weights of a group."""


def k_blocks(code_OI: Tensor, scale_OB: Tensor, offset_OB: Tensor, shared: tuple[Tensor, Tensor]) -> NDArray[np.uint8]:
    """Returns the blocks of a matrix, uint8 [O, bytes of a row].

    Args:
        code_OI: u, int8 in [0, 15]; I is a multiple of 256.
        scale_OB: d a, float32.
        offset_OB: e b, float32.
        shared: d and e of each block of 256, float32 [O, K], float16 numbers.
    """
    outputs, inputs = code_OI.shape
    blocks = inputs // WIDTH
    integers: list[NDArray[np.uint8]] = []
    for values_OB, shared_OK in zip((scale_OB, offset_OB), shared, strict=True):
        exact_OK8 = values_OB.reshape(outputs, blocks, GROUPS) / shared_OK[..., None]
        rounded_OK8 = exact_OK8.round()
        assert bool((exact_OK8 == rounded_OK8).all()), "no multiples of the numbers of their blocks"
        assert bool(((rounded_OK8 >= 0) & (rounded_OK8 <= LARGEST)).all()), "more than 6 bits"
        integers.append(rounded_OK8.numpy().astype(np.uint8))
    halves = [shared_OK.half().contiguous().numpy().astype("<f2")[..., None].view(np.uint8) for shared_OK in shared]
    code_OKp2w = code_OI.contiguous().numpy().view(np.uint8).reshape(outputs, blocks, -1, 2, GROUP)
    codes = code_OKp2w[..., 0, :] | (code_OKp2w[..., 1, :] << np.uint8(4))
    data: NDArray[np.uint8] = np.concatenate([*halves, _packed(*integers), codes.reshape(outputs, blocks, -1)], axis=2)
    return data.reshape(outputs, -1)


def _packed(a_OK8: NDArray[np.uint8], b_OK8: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the 12 bytes of each block, uint8 [O, K, 12]."""
    four, half = np.uint8(4), GROUPS // 2
    first = [low[..., :half] | ((low[..., half:] >> four) << np.uint8(6)) for low in (a_OK8, b_OK8)]
    low_bits = (a_OK8[..., half:] & np.uint8(15)) | (b_OK8[..., half:] << four)
    return np.concatenate([*first, low_bits], axis=2)
