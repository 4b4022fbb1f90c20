"""Int4 weights, float activations (scheme w4a16): a quarter of the weight bytes to read, which is what limits small batches.

One float32 scale per group of g inputs of an output channel, rounding half to even; asymmetric quantization adds a zero point z:

    symmetric      q = clamp(rint(W / s), -8, 7)               y = x @ (s q).T + b
    asymmetric     q = clamp(rint(W / s) + z, -8, 7)           y = x @ (s (q - z)).T + b

with s and z at [o, i // g]; the last group is shorter if g does not divide I. z is a code itself: every group holds 0 exactly, and a
weight of 0 stays 0. Rounding works with d = q - z, whose range [-8 - z, 7 - z] differs from group to group and always includes 0; q is
what is packed and exported.

The layer packs two codes per byte, the even input in the low half, as ONNX does. The code range is the one of the hardware formats: with
a symmetric scale of max |w| / 7 the code -8 is never used, with smaller scales it is.

A quantized checkpoint (`foundation.schemes.checkpoint`) stores s d in float; rint(w / s) recovers d.

Shape suffixes: N rows, I inputs, O outputs, G groups, P packed bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from foundation.schemes.int8 import OFF_GRID
from foundation.schemes.scales import SMALLEST_SCALE, Entry, Grid, Layer, Stored, positive
from foundation.schemes.weight_only import WeightOnlyLinear

LOW, HIGH = -8, 7
INT4_OPSET, INT4_IR = 21, 10
"""The first versions of ONNX that have INT4."""
Bound = int | Tensor
"""Smallest or largest code: one for all weights, or int8 [O, I]."""
WRONG_SCALES = "its scales must be positive numbers, one for each group of inputs of each output"
WRONG_ZERO_POINTS = f"its zero points must be int8 numbers from {LOW} to {HIGH}, one for each scale"


@dataclass(frozen=True)
class Int4Scales:
    """The scales of one linear layer in w4a16."""

    SCHEME: ClassVar[str] = "w4a16"
    LAYERS: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    weight_scale: Tensor
    """float32 [O, G]."""
    group_size: int
    """Number of inputs that share a scale; G is I / group_size, rounded up."""
    weight_zero_point: Tensor | None = None
    """int8 [O, G], in [-8, 7]: the code of 0; None for symmetric quantization, where it is 0."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> Int4Scales:
        """Returns the scales of a layer, read from a checkpoint."""
        if entry["weight_bits"] != 4 or not (isinstance(entry["group_size"], int) and entry["group_size"] > 0):
            raise ValueError("weight_bits must be 4 and group_size a positive integer")
        zero_point = tensors.get(f"{name}.weight_zero_point")
        if entry.get("symmetric", True) is not (zero_point is None):
            raise ValueError("symmetric must be false for layers with zero points, and for no others")
        return cls(tensors[f"{name}.weight_scale"], entry["group_size"], zero_point)

    @classmethod
    def chosen(cls, weight: Grid, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> Int4Scales:
        """Returns the scales that quantization chose; see `foundation.schemes.scales.Scales`."""
        return cls(weight.scale, group_size, weight.zero_point)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store in `quantization.safetensors`."""
        zero_point = {} if self.weight_zero_point is None else {"weight_zero_point": self.weight_zero_point}
        return {"weight_scale": self.weight_scale, **zero_point}

    def entry(self) -> Entry:
        """Returns the layer's entry in `quantization.json`."""
        entry: Entry = {"weight_bits": 4, "group_size": self.group_size}
        return entry if self.symmetric else {**entry, "symmetric": False}

    @property
    def grid(self) -> Grid:
        """Scales and zero points."""
        return Grid(self.weight_scale, self.weight_zero_point)

    @property
    def symmetric(self) -> bool:
        """Whether all zero points are 0 and not stored."""
        return self.weight_zero_point is None

    @property
    def largest(self) -> int:
        """The largest |code - zero point| that a weight can have."""
        return -LOW if self.symmetric else HIGH - LOW

    def expanded(self, inputs: int) -> Tensor:
        """Returns the scale of every weight, float32 `[O, I]`."""
        return expand(self.weight_scale, self.group_size, inputs)

    def zero(self, inputs: int) -> Bound:
        """Returns the zero point of every weight, int8 `[O, I]`; 0 for symmetric quantization."""
        return 0 if self.weight_zero_point is None else expand(self.weight_zero_point, self.group_size, inputs)

    def bounds(self, inputs: int) -> tuple[Bound, Bound]:
        """Returns the smallest and the largest code less the zero point of every weight."""
        zero_OI = self.zero(inputs)
        return LOW - zero_OI, HIGH - zero_OI

    def differences(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights less their zero points, int8 `[O, I]` in [-15, 15]."""
        inputs = weight_OI.shape[1]
        return nearest(weight_OI, self.expanded(inputs), *self.bounds(inputs))

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights rounded to the grid, as the checkpoint stores them."""
        return self.differences(weight_OI).float() * self.expanded(weight_OI.shape[1])

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights, int8 `[O, I]` in [-8, 7]."""
        return self.differences(weight_OI) + self.zero(weight_OI.shape[1])

    def stored(self, codes_OI: Tensor) -> Stored:
        """Returns how an ONNX graph stores these codes: INT4, or with zero points UINT4, which engines have kernels for."""
        codes, scale, since = codes_OI.numpy(), self.weight_scale.numpy(), (INT4_OPSET, INT4_IR)
        if self.weight_zero_point is None:
            return Stored(codes.astype(ml_dtypes.int4), scale, None, self.group_size, since)
        codes, zero_OG = ((array - np.int8(LOW)).astype(ml_dtypes.uint4) for array in (codes, self.weight_zero_point.numpy()))
        return Stored(codes, scale, zero_OG, self.group_size, since)

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
        if self.weight_zero_point is not None and not _are_zero_points(self.weight_zero_point, self.weight_scale.shape):
            return WRONG_ZERO_POINTS
        steps_OI = weight_OI.float() / self.expanded(weight_OI.shape[1])
        # A cast to a 16-bit type changes a weight by at most half a unit in the last place: in bfloat16 by 8 * 2^-8 = 0.03 codes.
        tolerance = self.largest * torch.finfo(weight_OI.dtype).eps / 2 + 1e-3
        low, high = self.bounds(weight_OI.shape[1])
        near = (steps_OI - steps_OI.round().clamp(min=low).clamp(max=high)).abs() <= tolerance
        return None if bool(near.all()) else OFF_GRID


class Int4Linear(WeightOnlyLinear):
    """A linear layer with packed int4 weights, multiplied in float.

    Args:
        name: Module path.
        weight_OI: Codes int8 [O, I], in [-8, 7].
        scales: Scales of the layer.
        bias_O: Float [O], or None.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None

    def __init__(self, name: str, weight_OI: Tensor, scales: Int4Scales, bias_O: Tensor | None) -> None:
        super().__init__()
        self.name, self.group_size = name, scales.group_size
        self.out_features, self.in_features = weight_OI.shape
        self.register_buffer("weight", pack(weight_OI).view(torch.int8))  # T5 casts its inputs to the type of a weight, unless it is int8
        self.register_buffer("weight_scale", scales.weight_scale)
        self.register_buffer("weight_zero_point", scales.weight_zero_point)
        self.register_buffer("bias", bias_O)

    def codes(self) -> Tensor:
        """Returns the codes of the weights, int8 [O, I]."""
        return unpack(self.weight.view(torch.uint8), self.in_features)

    def dequantized(self) -> Tensor:
        """Returns the weights, float32 [O, I]."""
        code_OI = self.codes()
        if self.weight_zero_point is not None:
            code_OI = code_OI - expand(self.weight_zero_point, self.group_size, self.in_features)
        return code_OI.float() * expand(self.weight_scale, self.group_size, self.in_features)

    def extra_repr(self) -> str:
        """Describes the layer in a printed model."""
        symmetric = self.weight_zero_point is None
        return f"{self.in_features}, {self.out_features}, group_size={self.group_size}, symmetric={symmetric}, bias={self.bias is not None}"


def num_groups(inputs: int, group_size: int) -> int:
    """Returns the number of groups; the last one may be shorter."""
    return -(-inputs // group_size)


def expand(scale_OG: Tensor, group_size: int, inputs: int) -> Tensor:
    """Expands group scales or zero points to one per weight, `[O, I]`."""
    return scale_OG.repeat_interleave(group_size, dim=1)[:, :inputs]


def nearest(weight: Tensor, scale: Tensor, low: Bound, high: Bound) -> Tensor:
    """Returns rint(w / s) within the bounds, int8; like `foundation.schemes.int8.quantize`, with bounds that may differ between weights."""
    return torch.round(weight / scale).clamp(min=low).clamp(max=high).to(torch.int8)


def group_scale(weight_OI: Tensor, group_size: int) -> Tensor:
    """Returns the scales that map the largest |weight| of each group to the code 7 or -7, float32 [O, G]; 1 for a group of zeros."""
    magnitude_OG = grouped(weight_OI, group_size).abs().amax(dim=2)
    return torch.where(magnitude_OG == 0, torch.ones_like(magnitude_OG), (magnitude_OG / HIGH).clamp(min=SMALLEST_SCALE))


def group_range(weight_OI: Tensor, group_size: int) -> Grid:
    """Returns scales and zero points with which the 16 codes span each group and 0: a weight moves by half a step at most.

        l = min(w, 0), h = max(w, 0) over the group      s = (h - l) / 15,  z = rint(-8 - l / s)

    l / s and h / s are 15 apart and -8 - z is next to l / s, so that no weight lies more than half a step outside of the codes. The scale
    of a group of zeros is 1, as in `group_scale`.
    """
    groups_OGg = grouped(weight_OI, group_size)
    low_OG, high_OG = groups_OGg.amin(dim=2).clamp(max=0), groups_OGg.amax(dim=2).clamp(min=0)
    step_OG = high_OG / (HIGH - LOW) - low_OG / (HIGH - LOW)  # the difference of two large floats may be infinite
    scale_OG = torch.where(step_OG == 0, torch.ones_like(step_OG), step_OG.clamp(min=SMALLEST_SCALE))
    return Grid(scale_OG, (LOW - low_OG / scale_OG).round().to(torch.int8))


def grouped(weight_OI: Tensor, group_size: int) -> Tensor:
    """Returns the weights by group, `[O, G, g]`; padded with zeros."""
    outputs, inputs = weight_OI.shape
    groups = num_groups(inputs, group_size)
    return nn.functional.pad(weight_OI, (0, groups * group_size - inputs)).reshape(outputs, groups, group_size)


def _are_zero_points(zero_point: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor holds zero points of this shape."""
    return zero_point.dtype == torch.int8 and zero_point.shape == shape and bool(((zero_point >= LOW) & (zero_point <= HIGH)).all())


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
