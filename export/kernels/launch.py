"""One launch of a kernel: its arguments, its grid, and what it costs. Runs on a GPU, in the interpreter, or is compiled without either.

A launch holds tensors, so tensors on the device `meta` describe any shape without memory: that is what `ahead_of_time` compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from foundation.core.errors import InputError
from foundation.schemes.scales import SMALLEST_SCALE, positive

LARGEST_SCALE = 2.0**120
"""Largest scale of codes; the smallest is `SMALLEST_SCALE`."""
Unit = Literal["int8", "fp16", "fp32"]
"""Units that multiply: int8 or fp16 matrix instructions, or the float32 lanes."""


@dataclass(frozen=True)
class Cost:
    """Minimal work of a launch on any hardware."""

    num_bytes: int
    """Bytes of all inputs and outputs, each counted once: what a perfect cache would read and write."""
    operations: int
    """Multiplications and additions, two for each multiply-accumulate."""
    unit: Unit
    """Where the operations run."""


@dataclass(frozen=True)
class Launch:
    """A kernel with everything that one launch needs."""

    kernel: Any
    """The function under `triton.jit`."""
    grid: tuple[int, ...]
    """Number of programs along each axis."""
    arguments: Mapping[str, Any]
    """All arguments, keyed by the kernel's parameter: tensors, None, int, float, bool and str."""
    cost: Cost
    """Bytes and operations."""
    num_warps: int = 4
    """Warps of a program."""
    num_stages: int = 3
    """Stages of the software pipeline of loads."""
    dependent: bool = False
    """Whether it may start before the kernel before it is complete (`dependent_launch`)."""

    @property
    def options(self) -> dict[str, int | bool]:
        """Options of compiler and launch. No fused multiply-add: the references round after each multiplication and each addition."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False, "launch_pdl": self.dependent}

    @property
    def given(self) -> dict[str, Any]:
        """The arguments with DEPENDENT, which every kernel has."""
        return {**self.arguments, "DEPENDENT": self.dependent}

    def run(self) -> None:
        """Launches the kernel on the device of its tensors."""
        if 0 not in self.grid:  # a grid without programs is an error on the GPU; there is nothing to compute
            self.kernel[self.grid](**self.given, **self.options)


def unit_of(x: Tensor) -> Unit:
    """Returns the unit that multiplies float tensors like this one."""
    return "fp32" if x.dtype == torch.float32 else "fp16"


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n: the lengths that a block may have."""
    return 1 << max(0, n - 1).bit_length()


def bytes_of(*tensors: Tensor | None) -> int:
    """Returns the bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def check_scale(name: str, scale: float | Tensor) -> None:
    """Raises an InputError unless a scale, or every one of several, is positive and finite as float32; reads them back from the device.

    Tensors of the device `meta` have no values to check.
    """
    if isinstance(scale, Tensor) and scale.is_meta:
        return
    if not positive(torch.as_tensor(scale, dtype=torch.float32)):
        raise InputError(name, f"{scale} given", "a positive number that is finite in float32 is allowed")


def check_step(name: str, scale: float) -> None:
    """Raises an InputError unless a scale of codes is one that `rounding` rounds with: from 2^-63 to 2^120."""
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise InputError(name, f"{scale} given", "a scale from 2^-63 to 2^120 is allowed where codes are made")


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises an InputError unless a tensor is contiguous and has this shape (-1 for any length) and one of these dtypes."""
    fits = len(tensor.shape) == len(shape) and all(want in (-1, got) for want, got in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype not in dtypes or not tensor.is_contiguous():
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise InputError(name, f"{given} given", f"a contiguous tensor of {allowed}, of shape {list(shape)}, is allowed")
