"""Int4 weights, float activations (scheme w4a16): a quarter of the weight bytes to read, which is what limits small batches.

One float32 scale per group of g inputs of an output channel, rounding half to even; asymmetric quantization adds a zero point z:

    symmetric      q = clamp(rint(W / s), -8, 7)               y = x @ (s q).T + b
    asymmetric     q = clamp(rint(W / s) + z, -8, 7)           y = x @ (s (q - z)).T + b

with s and z at [o, i // g]; the last group is shorter if g does not divide I. z is a code itself: every group holds 0 exactly, and a
weight of 0 stays 0. Rounding works with d = q - z, whose range [-8 - z, 7 - z] differs from group to group and always includes 0; q is
what is packed and exported.

The scales may be two-level numbers (`foundation.schemes.two_level`), and so may offsets, which K-quants have instead of zero points:

    k_quant        q = clamp(rint((W + m) / s), 0, 15) - 8     y = x @ (s (q + 8) - m).T + b         m >= 0

m need not be a multiple of s, so that a group can lie closer to its weights, and a weight of 0 does not stay 0. ONNX and TensorRT have no
such numbers: DequantizeLinear takes codes as zero points, and with real zero points MatMulNBits of ONNX Runtime makes its weights float
again in every call.

The layer packs two codes per byte, the even input in the low half, as ONNX does. The code range is the one of the hardware formats: with
a symmetric scale of max |w| / 7 the code -8 is never used, with smaller scales it is.

A quantized checkpoint (`foundation.schemes.checkpoint`) stores s d in float; rint(w / s) recovers d.

Shape suffixes: N rows, I inputs, O outputs, G groups, P packed bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.schemes.int8 import OFF_GRID
from foundation.schemes.scales import SMALLEST_SCALE, Entry, Grid, Layer, Stored, positive
from foundation.schemes.two_level import are_two_level, num_super_blocks
from foundation.schemes.weight_only import WeightOnlyLinear

LOW, HIGH = -8, 7
INT4_OPSET, INT4_IR = 21, 10
"""The first versions of ONNX that have INT4."""
GroupScales = Literal["float", "two_level", "k_quant"]
"""float: a float32 scale for each group; two_level: scales of `foundation.schemes.two_level`; k_quant: offsets of the same kind too."""
Bound = int | Tensor
"""Smallest or largest code: one for all weights, or int8 [O, I]."""
WRONG_SCALES = "its scales must be positive numbers, one for each group of inputs of each output"
WRONG_ZERO_POINTS = f"its zero points must be int8 numbers from {LOW} to {HIGH}, one for each scale"
WRONG_LEVELS = "its scales and offsets must be multiples, by integers of 6 bits, of the numbers of their super-blocks"
GRID = ("weight_scale", "weight_zero_point", "weight_offset", "weight_super_scale", "weight_super_offset")
"""Names of the tensors of a grid, in the order of the fields of `Grid`; all are divided with the outputs."""


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
    """int8 [O, G], in [-8, 7]: the code of 0; None for symmetric quantization, where it is 0, and for offsets."""
    weight_offset: Tensor | None = None
    """float32 [O, G], m of K-quants; None for all other grids."""
    weight_super_scale: Tensor | None = None
    """float32 [O, S], d of two-level scales; None for float scales, and for a rank's share of the inputs, which cuts super-blocks."""
    weight_super_offset: Tensor | None = None
    """float32 [O, S], e of two-level offsets; None without offsets, and for such a share."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> Self:
        """Returns the scales of a layer, read from a checkpoint."""
        if entry["weight_bits"] != 4 or not (isinstance(entry["group_size"], int) and entry["group_size"] > 0):
            raise ValueError("weight_bits must be 4 and group_size a positive integer")
        zero_point, offset, super_scale, super_offset = (tensors.get(f"{name}.{key}") for key in GRID[1:])
        if entry.get("symmetric", True) is not (zero_point is None and offset is None):
            raise ValueError("symmetric must be false for layers with zero points or offsets, and for no others")
        if zero_point is not None and offset is not None:
            raise ValueError("a layer has zero points or offsets, not both")
        found = cls(tensors[f"{name}.weight_scale"], entry["group_size"], zero_point, offset, super_scale, super_offset)
        if entry.get("group_scales", "float") != found.group_scales:
            raise ValueError(f"group_scales must be {found.group_scales} for a layer with such tensors")
        return found

    @classmethod
    def of_grid(cls, grid: Grid, group_size: int) -> Self:
        """Returns the scales of a grid of groups."""
        return cls(grid.scale, group_size, grid.zero_point, grid.offset, grid.super_scale, grid.super_offset)

    @classmethod
    def chosen(cls, weight: Grid, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> Self:
        """Returns the scales that quantization chose; see `foundation.schemes.scales.Scales`."""
        return cls.of_grid(weight, group_size)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store in `quantization.safetensors`."""
        return {key: tensor for key, tensor in zip(GRID, self.grid, strict=True) if tensor is not None}

    def entry(self) -> Entry:
        """Returns the layer's entry in `quantization.json`."""
        entry: Entry = {"weight_bits": 4, "group_size": self.group_size}
        if not self.symmetric:
            entry["symmetric"] = False
        if self.group_scales != "float":
            entry["group_scales"] = self.group_scales
        return entry

    @property
    def grid(self) -> Grid:
        """Scales, and zero points or offsets."""
        levels = self.weight_super_scale, self.weight_super_offset
        return Grid(self.weight_scale, self.weight_zero_point, self.weight_offset, *levels)

    @property
    def symmetric(self) -> bool:
        """Whether all zero points are 0 and not stored, and there are no offsets."""
        return self.weight_zero_point is None and self.weight_offset is None

    @property
    def group_scales(self) -> GroupScales:
        """How scales are stored, and offsets."""
        if self.weight_offset is not None:
            return "k_quant"
        return "float" if self.weight_super_scale is None else "two_level"

    def stored_bits(self) -> int:
        """Returns the bits of codes, scales, zero points and offsets as this format defines them, float scales in float32.

        Groups are counted whole. Files hold more where they spell out scales as floats.
        """
        blocks, per_block = self.weight_scale.numel(), {"float": 0, "two_level": 16, "k_quant": 32}[self.group_scales]
        per_group = {"float": 32, "two_level": 6, "k_quant": 12}[self.group_scales] + 4 * (self.weight_zero_point is not None)
        super_blocks = len(self.weight_scale) * num_super_blocks(self.weight_scale.shape[1])
        return blocks * (4 * self.group_size + per_group) + super_blocks * per_block

    @property
    def largest(self) -> int:
        """The largest |weight| in steps that a grid holds."""
        if self.weight_offset is not None:
            return max(HIGH - LOW, math.ceil((self.weight_offset / self.weight_scale).max()))
        return -LOW if self.symmetric else HIGH - LOW

    def expanded(self, inputs: int) -> Tensor:
        """Returns the scale of every weight, float32 `[O, I]`."""
        return expand(self.weight_scale, self.group_size, inputs)

    def zero(self, inputs: int) -> Bound:
        """Returns the code from which steps are counted, int8 `[O, I]`: zero points; 0 for symmetric quantization, -8 with offsets."""
        if self.weight_offset is not None:
            return LOW
        return 0 if self.weight_zero_point is None else expand(self.weight_zero_point, self.group_size, inputs)

    def offset(self, inputs: int) -> Tensor | None:
        """Returns the offset of every weight, float32 `[O, I]`; None without offsets."""
        return None if self.weight_offset is None else expand(self.weight_offset, self.group_size, inputs)

    def bounds(self, inputs: int) -> tuple[Bound, Bound]:
        """Returns the smallest and the largest number of steps (`differences`) of every weight."""
        zero_OI = self.zero(inputs)
        return LOW - zero_OI, HIGH - zero_OI

    def differences(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights less their zero points, or with offsets plus 8, int8 `[O, I]` in [-15, 15]."""
        inputs = weight_OI.shape[1]
        offset_OI = self.offset(inputs)
        shifted_OI = weight_OI if offset_OI is None else weight_OI + offset_OI
        return nearest(shifted_OI, self.expanded(inputs), *self.bounds(inputs))

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights rounded to the grid, as the checkpoint stores them."""
        return self.weights(self.differences(weight_OI))

    def weights(self, differences_OI: Tensor) -> Tensor:
        """Returns what numbers of steps stand for, float32 `[O, I]`."""
        inputs = differences_OI.shape[1]
        weight_OI, offset_OI = differences_OI.float() * self.expanded(inputs), self.offset(inputs)
        return weight_OI if offset_OI is None else weight_OI - offset_OI

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights, int8 `[O, I]` in [-8, 7]."""
        return self.differences(weight_OI) + self.zero(weight_OI.shape[1])

    def stored(self, codes_OI: Tensor) -> Stored:
        """Returns how an ONNX graph stores these codes: INT4, or with zero points UINT4, which engines have kernels for.

        Raises:
            InputError: There are offsets.
        """
        if self.weight_offset is not None:
            raise no_offsets("ONNX")
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
        if not self._are_levels():
            return WRONG_LEVELS
        offset_OI = self.offset(weight_OI.shape[1])
        steps_OI = (weight_OI.float() if offset_OI is None else weight_OI.float() + offset_OI) / self.expanded(weight_OI.shape[1])
        # A cast to a 16-bit type changes a weight by at most half a unit in the last place: in bfloat16 by 8 * 2^-8 = 0.03 codes.
        tolerance = self.largest * torch.finfo(weight_OI.dtype).eps / 2 + 1e-3
        low, high = self.bounds(weight_OI.shape[1])
        near = (steps_OI - steps_OI.round().clamp(min=low).clamp(max=high)).abs() <= tolerance
        return None if bool(near.all()) else OFF_GRID

    def _are_levels(self) -> bool:
        """Whether two-level numbers are multiples of the numbers of their super-blocks, and offsets are at least 0."""
        if self.weight_super_scale is not None and not are_two_level(self.weight_scale, self.weight_super_scale, smallest=1):
            return False
        if self.weight_offset is None:
            return self.weight_super_offset is None
        if self.weight_offset.shape != self.weight_scale.shape or not bool((self.weight_offset >= 0).all()):
            return False
        return self.weight_super_offset is None or are_two_level(self.weight_offset, self.weight_super_offset, smallest=0)


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
    weight_offset: Tensor | None

    def __init__(self, name: str, weight_OI: Tensor, scales: Int4Scales, bias_O: Tensor | None) -> None:
        super().__init__()
        self.name, self.group_size = name, scales.group_size
        self.out_features, self.in_features = weight_OI.shape
        self.register_buffer("weight", pack(weight_OI).view(torch.int8))  # T5 casts its inputs to the type of a weight, unless it is int8
        self.register_buffer("weight_scale", scales.weight_scale)
        self.register_buffer("weight_zero_point", scales.weight_zero_point)
        self.register_buffer("weight_offset", scales.weight_offset)
        self.register_buffer("bias", bias_O)

    def codes(self) -> Tensor:
        """Returns the codes of the weights, int8 [O, I]."""
        return unpack(self.weight.view(torch.uint8), self.in_features)

    def dequantized(self) -> Tensor:
        """Returns the weights, float32 [O, I]."""
        code_OI, inputs = self.codes(), self.in_features
        scale_OI = expand(self.weight_scale, self.group_size, inputs)
        if self.weight_offset is not None:
            return (code_OI - LOW).float() * scale_OI - expand(self.weight_offset, self.group_size, inputs)
        if self.weight_zero_point is not None:
            code_OI = code_OI - expand(self.weight_zero_point, self.group_size, inputs)
        return code_OI.float() * scale_OI

    def extra_repr(self) -> str:
        """Describes the layer in a printed model."""
        symmetric = self.weight_zero_point is None and self.weight_offset is None
        return f"{self.in_features}, {self.out_features}, group_size={self.group_size}, symmetric={symmetric}, bias={self.bias is not None}"


def no_offsets(reader: str) -> InputError:
    """Returns the error to raise if a format or engine has no real offsets."""
    return InputError("quantize.group_scales", "k_quant given", f"{reader} multiplies by no real offsets", "give two_level or float")


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
