"""The scales of one quantized linear layer: what every scheme offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn


class Scales(Protocol):
    """The scales of one quantized linear layer, whatever its scheme."""

    SCHEME: ClassVar[str]
    """Its row of `compress.schemes.table.SCHEMES`."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any]) -> Self:
        """Reads the scales of a layer from a checkpoint.

        Args:
            name: Module path of the layer.
            tensors: All of `quantization.safetensors`.
            entry: The layer's entry in `quantization.json`.

        Raises:
            KeyError, TypeError, ValueError: They are damaged.
        """

    @classmethod
    def chosen(cls, weight_scale: Tensor, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> Self:
        """Returns the scales that quantization chose; a scheme takes what it has a use for.

        Args:
            weight_scale: float32 [O], or [O, G] for groups.
            input_scale: float32 []; None where activations have no scale from calibration.
            bits: Bits of a weight.
            group_size: Inputs that share a scale.
            smooth_I: What the input is divided by, float32 [I]; None for nothing.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Returns what `quantization.safetensors` keeps, by name inside the layer."""

    def entry(self) -> dict[str, Any]:
        """Returns what `quantization.json` keeps: JSON types, `weight_bits` among them."""

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights that a checkpoint keeps, float32 `[O, I]`: weights that are on the grid already stay what they are."""

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights that are on the grid, `[O, I]`: int8 for integers, float8_e4m3fn for FP8."""

    def module(self, name: str, linear: nn.Linear) -> nn.Module:
        """Returns the quantized form of a float layer, whose weights need not be on the grid; the layer itself stays as it is.

        Args:
            name: Module path, for messages.
            linear: The float layer.
        """

    def problem(self, linear: nn.Linear) -> str | None:
        """Returns in one line why these cannot be the scales of a layer with weights on their grid; None where they can."""
