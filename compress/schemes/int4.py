"""Int4 weights, float activations (scheme w4a16): a quarter of the weight bytes to read, which is what limits small batches.

Symmetric quantization with one float32 scale per group of g inputs of an output channel, rounding half to even:

    q = clamp(rint(W / s), -8, 7)        s[o, i // g];   the last group is shorter if g does not divide I
    y = x @ (s q).T + b                  x and the product in the dtype of the input

The layer packs two codes per byte, the even input in the low half, as ONNX does, and dequantizes the weights in every call. The code range
is the one of the hardware formats and is asymmetric: with a scale of max |w| / 7 the code -8 is never used, with smaller scales it is.

A quantized checkpoint (`compress.schemes.checkpoint`) stores s q in float; rint(w / s) recovers q.

Not supported: zero-points; kernels that multiply packed weights (the engines have those).

Shape suffixes: N rows, I inputs, O outputs, G groups, P packed bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.schemes.int8 import OFF_GRID, SMALLEST_SCALE, positive, quantize
from compress.schemes.scales import Layer

LOW, HIGH = -8, 7
WRONG_SCALES = "its scales must be positive numbers, one for each group of inputs of each output"


@dataclass(frozen=True)
class Int4Scales:
    """The scales of one linear layer in w4a16."""

    SCHEME: ClassVar[str] = "w4a16"
    LAYERS: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    weight_scale: Tensor
    """float32 [O, G]."""
    group_size: int
    """Number of inputs that share a scale; G is I / group_size, rounded up."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any]) -> Int4Scales:
        """Returns the scales of a layer, read from a checkpoint."""
        if entry["weight_bits"] != 4 or not (isinstance(entry["group_size"], int) and entry["group_size"] > 0):
            raise ValueError("weight_bits must be 4 and group_size a positive integer")
        return cls(tensors[f"{name}.weight_scale"], entry["group_size"])

    @classmethod
    def chosen(cls, weight_scale: Tensor, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> Int4Scales:
        """Returns the scales that quantization chose; see `compress.schemes.scales.Scales`."""
        return cls(weight_scale, group_size)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store in `quantization.safetensors`."""
        return {"weight_scale": self.weight_scale}

    def entry(self) -> dict[str, Any]:
        """Returns the layer's entry in `quantization.json`."""
        return {"weight_bits": 4, "group_size": self.group_size}

    def expanded(self, inputs: int) -> Tensor:
        """Returns the scale of every weight, float32 `[O, I]`."""
        return expand(self.weight_scale, self.group_size, inputs)

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights rounded to the grid, as the checkpoint stores them."""
        scale_OI = self.expanded(weight_OI.shape[1])
        return quantize(weight_OI, scale_OI, LOW, HIGH).float() * scale_OI

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights, int8 `[O, I]` in [-8, 7]."""
        return quantize(weight_OI, self.expanded(weight_OI.shape[1]), LOW, HIGH)

    def module(self, name: str, layer: Layer) -> Int4Linear:
        """Returns the int4 layer for a float layer."""
        assert isinstance(layer, nn.Linear), f"{name} is {type(layer).__name__}"
        bias_O = None if layer.bias is None else layer.bias.detach()
        return Int4Linear(name, self.codes(layer.weight.detach().float()), self, bias_O)

    def problem(self, weight_OI: Tensor) -> str | None:
        """Returns why these scales do not match the layer's grid weights, or None if they match."""
        if self.weight_scale.shape != (len(weight_OI), num_groups(weight_OI.shape[1], self.group_size)):
            return WRONG_SCALES
        if not positive(self.weight_scale):
            return WRONG_SCALES
        steps_OI = weight_OI.float() / self.expanded(weight_OI.shape[1])
        # A cast to a 16-bit type changes a weight by at most half a unit in the last place: in bfloat16 by 8 * 2^-8 = 0.03 codes.
        tolerance = 8 * torch.finfo(weight_OI.dtype).eps / 2 + 1e-3
        near = (steps_OI - steps_OI.round().clamp(LOW, HIGH)).abs() <= tolerance
        return None if bool(near.all()) else OFF_GRID


class Int4Linear(nn.Module):
    """A linear layer with packed int4 weights, multiplied in float.

    Args:
        name: Module path.
        weight_OI: Codes int8 [O, I], in [-8, 7].
        scales: Scales of the layer.
        bias_O: Float [O], or None.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, name: str, weight_OI: Tensor, scales: Int4Scales, bias_O: Tensor | None) -> None:
        super().__init__()
        self.name, self.group_size = name, scales.group_size
        self.out_features, self.in_features = weight_OI.shape
        self.register_buffer("weight", pack(weight_OI).view(torch.int8))  # T5 casts its inputs to the type of a weight, unless it is int8
        self.register_buffer("weight_scale", scales.weight_scale)
        self.register_buffer("bias", bias_O)

    def codes(self) -> Tensor:
        """Returns the codes of the weights, int8 [O, I]."""
        return unpack(self.weight.view(torch.uint8), self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I], in the dtype of the input."""
        weight_OI = self.codes().float() * expand(self.weight_scale, self.group_size, self.in_features)
        return nn.functional.linear(x, weight_OI.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def extra_repr(self) -> str:
        """Describes the layer in a printed model."""
        return f"{self.in_features}, {self.out_features}, group_size={self.group_size}, bias={self.bias is not None}"


def num_groups(inputs: int, group_size: int) -> int:
    """Returns the number of groups; the last one may be shorter."""
    return -(-inputs // group_size)


def expand(scale_OG: Tensor, group_size: int, inputs: int) -> Tensor:
    """Expands group scales to one scale per weight, `[O, I]`."""
    return scale_OG.repeat_interleave(group_size, dim=1)[:, :inputs]


def group_scale(weight_OI: Tensor, group_size: int) -> Tensor:
    """Returns the scales that map the largest |weight| of each group to the code 7 or -7, float32 [O, G]; 1 for a group of zeros."""
    outputs, inputs = weight_OI.shape
    groups = num_groups(inputs, group_size)
    padded_OI = nn.functional.pad(weight_OI, (0, groups * group_size - inputs))
    magnitude_OG = padded_OI.reshape(outputs, groups, group_size).abs().amax(dim=2)
    return torch.where(magnitude_OG == 0, torch.ones_like(magnitude_OG), (magnitude_OG / HIGH).clamp(min=SMALLEST_SCALE))


def pack(codes_OI: Tensor) -> Tensor:
    """Packs two int4 codes per byte, uint8 [O, P]: input 2p in the low half of byte p, input 2p + 1 in the high half, 0 past the end.

    Args:
        codes_OI: int8 [O, I], in [-8, 7].
    """
    halves_OI = nn.functional.pad(codes_OI, (0, codes_OI.shape[1] % 2)).view(torch.uint8) & 15
    return halves_OI[:, 0::2] | (halves_OI[:, 1::2] << 4)


def unpack(packed_OP: Tensor, inputs: int) -> Tensor:
    """Returns the codes, int8 [O, I], from the output of `pack`."""
    halves_OP2 = torch.stack([packed_OP & 15, packed_OP >> 4], dim=2)
    codes_OI = halves_OP2.flatten(1)[:, :inputs].view(torch.int8)
    return torch.where(codes_OI > HIGH, codes_OI - 16, codes_OI)
