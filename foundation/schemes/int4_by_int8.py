"""Int4 weights times int8 activations in blocks (scheme w4a8-block): what the 4-bit products of processors multiply.

Weights are those of w4a16 (`foundation.schemes.int4`). The inputs that share a weight scale, group G of g inputs, are a block: its scale is
found at run time, for each row n, and its codes are rounded half to even:

    s_nG = max |x_ni| / 127 over i in G,   q_x = rint(x / s_nG)        int8; a block of zeros has the scale 1
    y    = sum over G of s_nG s_oG (q_x @ (q - z).T) + b               the sum within a block is exact in integers

Smaller blocks round less: the largest input of a block sets the step of its g inputs alone. MatMulNBits of ONNX Runtime computes this at
accuracy_level 4, and llama.cpp with blocks of 32 (Q4_0 and Q4_1 times Q8_0 and Q8_1, whose scales are float16).

In torch the rounded input is multiplied in float32 by the dequantized weights: the same sum up to the order of its additions.

Shape suffixes: N rows, I inputs, O outputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from foundation.schemes.int4 import Int4Linear, Int4Scales
from foundation.schemes.int8 import ACTIVATION_HIGH
from foundation.schemes.scales import Layer


@dataclass(frozen=True)
class BlockScales(Int4Scales):
    """The scales of one linear layer in w4a8-block: of its weights, and the size of the blocks of its inputs."""

    SCHEME: ClassVar[str] = "w4a8-block"

    def module(self, name: str, layer: Layer) -> BlockLinear:
        """Returns the layer with int4 weights and int8 inputs for a float layer."""
        assert isinstance(layer, nn.Linear), f"{name} is {type(layer).__name__}"
        bias_O = None if layer.bias is None else layer.bias.detach()
        return BlockLinear(name, self.codes(layer.weight.detach().float()), self, bias_O)


class BlockLinear(Int4Linear):
    """A linear layer with packed int4 weights, whose input is rounded to int8 in blocks; the arguments are as for `Int4Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I], in the dtype of the input."""
        return super().forward(in_blocks(x.float(), self.group_size).to(x.dtype))


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Returns float32 [..., I] rounded to int8 with a scale max |x| / 127 for each block of inputs; the last may be shorter."""
    inputs = x.shape[-1]
    padded = nn.functional.pad(x, (0, -inputs % block))
    parts = padded.reshape(*x.shape[:-1], -1, block)
    scale = parts.abs().amax(dim=-1, keepdim=True) / ACTIVATION_HIGH
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    rounded: Tensor = ((parts / scale).round() * scale).flatten(-2)[..., :inputs]
    return rounded
