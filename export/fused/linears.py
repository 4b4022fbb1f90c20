"""The linear layers and norms of a plan: what they hold, and their entries in its file.

    float       y = x W^T + b
    int8        y = float32(q_x q_w^T) * scales + b     one scale for the input (w8a8), or one for each token (w8a8-dynamic)
    in blocks   the same, of which only blocks with a code other than 0 are stored
    w8a16       y = x (s q)^T + b                       a scale for each output
    int4        y = x (s (q - z))^T + b                 a scale for each group of inputs (w4a16)

A layer has the tensors `<path>.weight` (float), `<path>.codes`, `<path>.bitmap` and `<path>.blocks`, or `<path>.packed`; `<path>.scale`,
`<path>.zero_point`, `<path>.bias`, `<path>.smooth`.

Shape suffixes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from export.kernels.block_sparse import Packed, SparseWeight, index
from export.kernels.epilogue import Int8Weight
from export.kernels.norm import Norm
from export.kernels.w4a16 import Int4Weight

STORED = ("weight", "codes", "blocks", "packed")
"""Tensors of a layer that are weights."""


@dataclass(frozen=True)
class FloatLinear:
    """A layer that stayed float."""

    name: str
    """Path of its module."""
    weight: Tensor
    """float32 [O, I]."""
    bias: Tensor | None
    """float32 [O]."""

    @property
    def is_int8(self) -> bool:
        """Whether it multiplies integers."""
        return False

    @property
    def bits(self) -> int | None:
        """Bits of a weight's code; None for floats."""
        return None

    @property
    def outputs(self) -> int:
        """O."""
        return len(self.weight)

    def tensors(self) -> dict[str, Tensor | None]:
        """Returns its entry in the file."""
        return {"weight": self.weight, "bias": self.bias}

    def to(self, device: torch.device) -> FloatLinear:
        """Returns it on a device."""
        return FloatLinear(self.name, self.weight.to(device), moved(self.bias, device))


@dataclass(frozen=True)
class Int8Linear:
    """A layer in int8."""

    name: str
    """Path of its module."""
    weight: Int8Weight | SparseWeight
    input_scale: float | None
    """Scale of its input's codes, a float32 number; None where every token has its own, made as it is quantized."""
    smooth: Tensor | None = None
    """float32 [I]: the input is divided by it before it is quantized."""

    @property
    def is_int8(self) -> bool:
        """Whether it multiplies integers."""
        return True

    @property
    def bits(self) -> int | None:
        """Bits of a weight's code; None for floats."""
        return 8

    @property
    def outputs(self) -> int:
        """O."""
        return len(self.weight.scale)

    def tensors(self) -> dict[str, Tensor | None]:
        """Returns its entry in the file."""
        weight = self.weight
        stored = (
            {"bitmap": weight.packed.bitmap, "blocks": weight.packed.codes} if isinstance(weight, SparseWeight) else {"codes": weight.codes}
        )
        return {**stored, "scale": weight.scale, "bias": weight.bias, "smooth": self.smooth}

    def to(self, device: torch.device) -> Int8Linear:
        """Returns it on a device."""
        old, scale = self.weight, self.weight.scale.to(device)
        bias, smooth = moved(old.bias, device), moved(self.smooth, device)
        if isinstance(old, SparseWeight):
            packed = Packed(old.packed.shape, old.packed.bitmap.to(device), old.packed.codes.to(device))
            return Int8Linear(self.name, SparseWeight(packed, index(packed), scale, bias), self.input_scale, smooth)
        return Int8Linear(self.name, weight_to(old, device), self.input_scale, smooth)


@dataclass(frozen=True)
class Int8FloatLinear:
    """A layer with int8 weights, multiplied in float (w8a16)."""

    name: str
    """Path of its module."""
    weight: Int8Weight

    @property
    def is_int8(self) -> bool:
        """Whether it multiplies integers."""
        return False

    @property
    def bits(self) -> int | None:
        """Bits of a weight's code; None for floats."""
        return 8

    @property
    def outputs(self) -> int:
        """O."""
        return len(self.weight.scale)

    def tensors(self) -> dict[str, Tensor | None]:
        """Returns its entry in the file."""
        return {"codes": self.weight.codes, "scale": self.weight.scale, "bias": self.weight.bias}

    def to(self, device: torch.device) -> Int8FloatLinear:
        """Returns it on a device."""
        return Int8FloatLinear(self.name, weight_to(self.weight, device))


@dataclass(frozen=True)
class Int4Linear:
    """A layer with int4 weights, multiplied in float (w4a16)."""

    name: str
    """Path of its module."""
    weight: Int4Weight

    @property
    def is_int8(self) -> bool:
        """Whether it multiplies integers."""
        return False

    @property
    def bits(self) -> int | None:
        """Bits of a weight's code; None for floats."""
        return 4

    @property
    def outputs(self) -> int:
        """O."""
        return len(self.weight.packed)

    def tensors(self) -> dict[str, Tensor | None]:
        """Returns its entry in the file."""
        weight = self.weight
        return {"packed": weight.packed, "scale": weight.scale, "zero_point": weight.zero_point, "bias": weight.bias}

    def to(self, device: torch.device) -> Int4Linear:
        """Returns it on a device."""
        old = self.weight
        zero_point, bias = moved(old.zero_point, device), moved(old.bias, device)
        weight = Int4Weight(old.packed.to(device), old.inputs, old.group_size, old.scale.to(device), zero_point, bias)
        return Int4Linear(self.name, weight)


Linear = FloatLinear | Int8Linear | Int8FloatLinear | Int4Linear


def document_of(linear: Linear) -> dict[str, Any]:
    """Returns what the JSON of a plan says about a layer."""
    entry: dict[str, Any] = {"name": linear.name}
    if isinstance(linear, Int8Linear):
        entry["input_scale"] = linear.input_scale
        if isinstance(linear.weight, SparseWeight):
            entry["shape"] = list(linear.weight.packed.shape)
    if isinstance(linear, Int8FloatLinear):
        entry["inputs"] = "float"
    if isinstance(linear, Int4Linear):
        entry |= {"inputs": linear.weight.inputs, "group_size": linear.weight.group_size}
    return entry


def linear_from(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Linear:
    """Returns a layer, given its entry in the JSON and the tensors of the file.

    Raises:
        KeyError: A tensor is missing.
    """
    name, own = entry["name"], f"{entry['name']}."
    found = {key.removeprefix(own): tensor for key, tensor in tensors.items() if key.startswith(own) and "." not in key.removeprefix(own)}
    bias = found.get("bias")
    if "group_size" in entry:
        groups = entry["inputs"], entry["group_size"]
        return Int4Linear(name, Int4Weight(found["packed"], *groups, found["scale"], found.get("zero_point"), bias))
    if entry.get("inputs") == "float":
        return Int8FloatLinear(name, Int8Weight(found["codes"], found["scale"], bias))
    if "input_scale" not in entry:
        return FloatLinear(name, found["weight"], bias)
    weight: Int8Weight | SparseWeight
    if "shape" in entry:
        packed = Packed(tuple(entry["shape"]), found["bitmap"], found["blocks"])
        weight = SparseWeight(packed, index(packed), found["scale"], bias)
    else:
        weight = Int8Weight(found["codes"], found["scale"], bias)
    return Int8Linear(name, weight, entry["input_scale"], found.get("smooth"))


def tensors_of_norm(name: str, norm: Norm) -> dict[str, Tensor]:
    """Returns the entry of a norm in the file."""
    return {f"{name}.gain": norm.gain} | ({} if norm.bias is None else {f"{name}.bias": norm.bias})


def document_of_norm(norm: Norm) -> dict[str, Any]:
    """Returns what the JSON of a plan says about a norm."""
    return {"eps": norm.eps, "centred": norm.centred}


def norm_from(name: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Norm:
    """Returns a norm, given its name and entry in the JSON, and the tensors of the file.

    Raises:
        KeyError: A tensor is missing.
    """
    return Norm(tensors[f"{name}.gain"], tensors.get(f"{name}.bias"), entry["eps"], entry["centred"])


def norm_to(norm: Norm, device: torch.device) -> Norm:
    """Returns a norm on a device."""
    return Norm(norm.gain.to(device), moved(norm.bias, device), norm.eps, norm.centred)


def weight_to(weight: Int8Weight, device: torch.device) -> Int8Weight:
    """Returns a weight on a device."""
    return Int8Weight(weight.codes.to(device), weight.scale.to(device), moved(weight.bias, device))


def moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """Returns a tensor, if there is one, on a device."""
    return None if tensor is None else tensor.to(device)


def share_of_integers(linears: Iterable[Linear], tables: Iterable[Tensor]) -> float:
    """Returns the share of the stored weights and tables that are codes; blocks that are not stored do not count."""
    stored = [tensor for layer in linears for name, tensor in layer.tensors().items() if name in STORED and tensor is not None]
    sizes = [(tensor.numel() * (2 if tensor.dtype == torch.uint8 else 1), not tensor.is_floating_point()) for tensor in (*stored, *tables)]
    return sum(size for size, is_integer in sizes if is_integer) / sum(size for size, _ in sizes)
