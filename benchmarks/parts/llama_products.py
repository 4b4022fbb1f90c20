"""How llama.cpp rounds the inputs of its products on a CPU, by the format of the matrix (`vec_dot_type` of ggml-cpu).

F32                 float32
F16                 float16
Q8_0, Q4_0, Q4_1    int8 in blocks of 32, with scale d = max |x| / 127, stored as float16
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 32


def round_inputs(kind: str) -> Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Returns a forward pre-hook of a linear layer whose matrix has a format."""
    rounding = {"F32": lambda x: x, "F16": lambda x: x.half().float()}.get(kind, in_blocks)
    return lambda _, inputs: (rounding(inputs[0]), *inputs[1:])


def in_blocks(x: Tensor) -> Tensor:
    """Returns numbers on the int8 grids of their blocks, float32 of the same shape."""
    block = x.unflatten(-1, (-1, BLOCK))
    scale = block.abs().amax(-1, keepdim=True) / 127
    code = (block / torch.where(scale > 0, scale, 1)).round()
    return (code * scale.half().float()).flatten(-2)
