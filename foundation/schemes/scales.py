"""The interface of every quantization scheme: the scales of one quantized layer, linear or a convolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol, Required, Self, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

SMALLEST_SCALE = 2.0**-63  # the product of two scales stays a normal float32 number, 2^-126 or more

Layer = nn.Linear | nn.Conv1d | nn.Conv2d
"""A layer that can be quantized."""


class Entry(TypedDict, total=False):
    """A layer in `quantization.json`; `Scales.read` checks what a file holds."""

    weight_bits: Required[int]
    group_size: int
    """Inputs that share a scale; absent where all do."""
    symmetric: bool
    """False for weights with zero points or offsets, else absent."""
    group_scales: str
    """two_level or k_quant; absent for a float scale per group."""
    convolution: bool
    """True for a convolution, else absent."""


class Grid(NamedTuple):
    """The quantization grid of a weight: a code stands for (code - zero point) * scale, or for (code + 8) * scale - offset."""

    scale: Tensor
    """float32 [O], or [O, G] for groups."""
    zero_point: Tensor | None = None
    """int8 of the same shape; None where it is 0."""
    offset: Tensor | None = None
    """float32 of the same shape, at least 0; None for grids without, which have all others but those of K-quants."""
    super_scale: Tensor | None = None
    """float32 [O, S]: what the scales of a super-block are multiples of (`foundation.schemes.two_level`); None for float scales."""
    super_offset: Tensor | None = None
    """float32 [O, S]: what its offsets are multiples of; None where there are no offsets."""

    def rows(self, start: int, stop: int) -> Grid:
        """Returns the grid of the outputs start to stop."""
        return Grid(*(None if tensor is None else tensor[start:stop] for tensor in self))  # type: ignore[arg-type]


class Stored(NamedTuple):
    """How an ONNX graph stores a weight, for DequantizeLinear."""

    codes: NDArray[np.generic]
    """[O, I], in the number format of the scheme."""
    scale: NDArray[np.generic]
    """float32 [O], or [O, G] for blocks of inputs."""
    zero_point: NDArray[np.generic] | None = None
    """Zero points, with the shape of `scale` and the type of the codes; None if they are 0."""
    block_size: int = 0
    """Inputs that share a scale; 0: all inputs of an output."""
    since: tuple[int, int] = (0, 0)
    """The first operator set and IR version of ONNX that have this."""


class Scales(Protocol):
    """The scales of one quantized layer, for any scheme. Weights are `[O, I]`; weights of a convolution `[O, C / groups, k...]`."""

    SCHEME: ClassVar[str]
    """Name of the scheme, a row of `foundation.schemes.table.SCHEMES`."""
    LAYERS: ClassVar[tuple[type[nn.Module], ...]]
    """Classes of the float layers that they belong to."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> Self:
        """Returns the scales of a layer, read from a checkpoint.

        Args:
            name: Module path of the layer.
            tensors: All tensors of `quantization.safetensors`.
            entry: The layer's entry in `quantization.json`.

        Raises:
            KeyError, TypeError, ValueError: The files are damaged.
        """

    @classmethod
    def chosen(cls, weight: Grid, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> Self:
        """Returns scales with the values that quantization chose; a scheme ignores what it does not use.

        Args:
            weight: Scales of the weight, and zero points where the scheme has them.
            input_scale: float32 []; None if activations have no calibrated scale.
            bits: Bits per weight.
            group_size: Number of inputs that share a scale.
            smooth_I: The input is divided by it, float32 [I]; None for no smoothing.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store in `quantization.safetensors`, by name within the layer."""

    def entry(self) -> Entry:
        """Returns the layer's entry in `quantization.json` (JSON types), including `weight_bits`."""

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights rounded to the grid, as the checkpoint stores them, float32 `[O, I]`; weights on the grid do not change."""

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights on the grid, `[O, I]`: int8 for integer schemes, float8_e4m3fn for FP8."""

    def stored(self, codes_OI: Tensor) -> Stored:
        """Returns how an ONNX graph stores these codes, given as `codes` returns them."""

    def module(self, name: str, layer: Layer) -> nn.Module:
        """Returns the quantized layer for a float layer, whose weights need not be on the grid; `layer` is not modified.

        Args:
            name: Module path, for messages.
            layer: The float layer, of a class in `LAYERS`.
        """

    def problem(self, weight_OI: Tensor) -> str | None:
        """Returns in one line why these scales do not match a layer's grid weights, given as stored, or None if they match."""


def positive(*scales: Tensor) -> bool:
    """Whether all values are positive and finite."""
    return all(bool((scale.isfinite() & (scale > 0)).all()) for scale in scales)
