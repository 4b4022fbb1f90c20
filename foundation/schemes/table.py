"""The table of quantization schemes, one row of facts per scheme. Other code tests a fact, never a name:

    SCHEMES[scheme].activations == "float"       not  scheme == "w4a16"

A scheme defines the number formats of a linear layer, and of a convolution if it quantizes those. To add one, write a file in this folder
with the scales of a layer (`foundation.schemes.scales.Scales`) and the quantized layer, and add a row here. Weights get the scale
max |w| / `largest_weight` per output channel, unless `quantize.schemes.SEARCHES` has a search for better scales for its number format.
`export.graph.quantized` and the engine files use the facts to decide how each engine runs the scheme.

This module does not import torch, because the engine processes read it too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from foundation.core.named import Named, one_of

if TYPE_CHECKING:
    from foundation.schemes.scales import Scales


@dataclass(frozen=True)
class SchemeFacts:
    """The facts about one scheme that other code needs."""

    scales: Callable[[], type[Scales]]
    """Imports the scheme's file and returns the class of the scales of a linear layer."""
    numbers: str
    """Number format of the weights."""
    precision: str
    """Name of the precision of engines built from such a checkpoint."""
    activations: Literal["static", "dynamic", "blocks", "float"]
    """static: one calibrated scale per tensor; dynamic: a scale per token, computed at run time; blocks: the same for the inputs of a token
    that share a weight scale; float: not quantized."""
    weight_bits: int
    """Bits per weight."""
    largest_weight: int
    """Largest weight code."""
    smallest_step: float = 1.0
    """Distance between neighbouring codes near 0."""
    choose_bits: bool = False
    """Whether 7-bit weights are possible, for CPUs without VNNI, whose int8 kernels saturate with 8 bits."""
    largest_activation: int | None = None
    """Largest activation code with a calibrated scale; None if activations have none."""
    equal_steps: bool = True
    """Whether codes are equally spaced, which some calibrators require."""
    integer: bool = True
    """Whether weights are integers, as error-minimizing rounding (GPTQ, AdaRound, AutoRound) requires."""
    grouped: bool = False
    """Whether groups of inputs have their own scales, which AWQ chooses."""
    zero_points: bool = False
    """Whether groups can have zero points too."""
    smoothed: bool = False
    """Whether smoothing activation outliers (SmoothQuant) helps."""
    trainable: bool = False
    """Whether quantization-aware training supports the scheme."""
    convolutions: Callable[[], type[Scales]] | None = None
    """Imports the file and returns the class of the scales of a convolution; None if convolutions stay float."""
    sites: bool = False
    """Whether attention products and residual additions can be int8 too."""

    @property
    def needs_float8(self) -> bool:
        """Whether a layer multiplies floats of 8 bits, which no CPU does: weights and activations are such floats."""
        return not self.integer and self.activations != "float"


def scales_in(module: str, name: str) -> Callable[[], type[Scales]]:
    """Returns a function that imports a scheme's scales class from a file in this folder on first use."""

    def imported() -> type[Scales]:
        found: type[Scales] = getattr(importlib.import_module(f"foundation.schemes.{module}"), name)
        return found

    return imported


SCHEMES: Mapping[str, SchemeFacts] = {
    "w8a8": SchemeFacts(
        scales=scales_in("int8", "LayerScales"),
        numbers="int8",
        precision="int8",
        activations="static",
        weight_bits=8,
        largest_weight=127,
        choose_bits=True,
        largest_activation=127,
        smoothed=True,
        trainable=True,
        convolutions=scales_in("int8_convolution", "ConvolutionScales"),
        sites=True,
    ),
    "w8a8-dynamic": SchemeFacts(
        scales=scales_in("int8", "DynamicScales"),
        numbers="int8",
        precision="int8-dynamic",
        activations="dynamic",
        weight_bits=8,
        largest_weight=127,
        choose_bits=True,
        smoothed=True,
    ),
    "w8a16": SchemeFacts(
        scales=scales_in("int8_weights", "WeightScales"),
        numbers="int8",
        precision="w8a16",
        activations="float",
        weight_bits=8,
        largest_weight=127,
    ),
    "w4a16": SchemeFacts(
        scales=scales_in("int4", "Int4Scales"),
        numbers="int4",
        precision="w4a16",
        activations="float",
        weight_bits=4,
        largest_weight=8,
        grouped=True,
        zero_points=True,
    ),
    "w4a8-block": SchemeFacts(
        scales=scales_in("int4_by_int8", "BlockScales"),
        numbers="int4",
        precision="w4a8-block",
        activations="blocks",
        weight_bits=4,
        largest_weight=8,
        grouped=True,
        zero_points=True,
    ),
    "fp8": SchemeFacts(
        scales=scales_in("fp8", "Fp8Scales"),
        numbers="fp8",
        precision="fp8",
        activations="static",
        weight_bits=8,
        largest_weight=448,
        smallest_step=2.0**-9,
        largest_activation=448,
        equal_steps=False,
        integer=False,
    ),
    # rows are added above this line
}

Scheme = Annotated[str, Named(SCHEMES)]
"""Name of a scheme; in a recipe it must be a row of `SCHEMES`."""
DEFAULT_SCHEME = next(iter(SCHEMES))


def facts_of(scales: Scales) -> SchemeFacts:
    """Returns the row of the scheme of a layer's scales."""
    return SCHEMES[scales.SCHEME]


def of_precision(precision: str) -> SchemeFacts | None:
    """Returns the row of the scheme with this engine precision, or None for a float precision."""
    return next((row for row in SCHEMES.values() if row.precision == precision), None)


def is_static_int8(precision: str) -> bool:
    """Whether engines of this precision multiply int8 with activation scales from calibration."""
    scheme = of_precision(precision)
    return scheme is not None and scheme.numbers == "int8" and scheme.activations == "static"


def weight_only(numbers: str) -> str:
    """Returns the precision of engines with integer weights in this number format and float activations."""
    return next(row.precision for row in SCHEMES.values() if row.numbers == numbers and row.activations == "float")


INT4_BY_INT8 = "w4a8"
"""Name of a layer with int4 weights whose input an engine rounds to int8."""
INT4_PRECISIONS = (weight_only("int4"), INT4_BY_INT8)
"""Possible names of a layer with int4 weights."""


def schemes_with(fact: Callable[[SchemeFacts], bool]) -> str:
    """Returns the names of the schemes for which `fact` holds, for messages: "a, b or c"."""
    return one_of([name for name, row in SCHEMES.items() if fact(row)])
