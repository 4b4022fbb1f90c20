"""The table of quantization schemes: one row of facts for each. Other code asks for a fact, never for a name.

    SCHEMES[scheme].activations == "float"       not  scheme == "w4a16"

A scheme says in which numbers a linear layer multiplies. To add one, write a file in this folder with the scales of a layer and the
quantized layer itself (`compress.schemes.scales.Scales`), and add a row here. Its weights get the scale max |w| / `largest_weight` of
each output channel; a better one is searched where `quantize.schemes.SEARCHES` has a search for its numbers. What each engine makes of it
is decided by its facts in `export.graph.quantized` and in the file of the engine.

This module imports no torch: the processes of the engines read it too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from compress.core.named import Named, one_of

if TYPE_CHECKING:
    from compress.schemes.scales import Scales


@dataclass(frozen=True)
class SchemeFacts:
    """All that sets a scheme apart, apart from its code."""

    scales: Callable[[], type[Scales]]
    """Returns the class of the scales of a layer; imports its file."""
    numbers: Literal["int8", "int4", "fp8"] | str
    """What the weights are."""
    precision: str
    """What the precision of an engine of such a checkpoint is called."""
    activations: Literal["static", "dynamic", "float"]
    """static: one scale from calibration; dynamic: a scale for each token, at run time; float: not quantized."""
    weight_bits: int
    """Bits of a weight."""
    largest_weight: int
    """Largest code of a weight."""
    smallest_step: float = 1.0
    """Distance of two neighbouring codes near 0."""
    choose_bits: bool = False
    """Whether 7 bits may be asked for: int8 kernels without VNNI saturate with 8."""
    largest_activation: int | None = None
    """Largest code of an activation whose scale comes from calibration; None where it does not."""
    equal_steps: bool = True
    """Whether codes are equally spaced, which some calibrators rely on."""
    integer: bool = True
    """Whether weights are integers, which can be rounded by error (GPTQ, AdaRound)."""
    grouped: bool = False
    """Whether groups of inputs have scales of their own, which AWQ chooses."""
    smoothed: bool = False
    """Whether it gains by activations with smaller channels (SmoothQuant)."""
    trainable: bool = False
    """Whether quantization-aware training has a forward pass for it."""
    sites: bool = False
    """Whether the products of attention and residual additions can be int8 too."""


def scales_in(module: str, name: str) -> Callable[[], type[Scales]]:
    """Returns what imports the scales of a scheme from a file of this folder once they are needed."""

    def imported() -> type[Scales]:
        found: type[Scales] = getattr(importlib.import_module(f"compress.schemes.{module}"), name)
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
    "w4a16": SchemeFacts(
        scales=scales_in("int4", "Int4Scales"),
        numbers="int4",
        precision="w4a16",
        activations="float",
        weight_bits=4,
        largest_weight=8,
        grouped=True,
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
}

Scheme = Annotated[str, Named(SCHEMES)]
"""The name of a scheme; in a recipe it has to be a row of `SCHEMES`."""
DEFAULT_SCHEME = next(iter(SCHEMES))


def facts_of(scales: Any) -> SchemeFacts:
    """Returns the row of the scheme that the scales of a layer belong to."""
    return SCHEMES[scales.SCHEME]


def of_precision(precision: str) -> SchemeFacts | None:
    """Returns the row of the scheme that engines of this precision run; None for a float precision."""
    return next((row for row in SCHEMES.values() if row.precision == precision), None)


def weight_only(numbers: str) -> str:
    """Returns the precision of engines whose weights are these numbers and whose activations are float."""
    return next(row.precision for row in SCHEMES.values() if row.numbers == numbers and row.activations == "float")


def schemes_with(fact: Callable[[SchemeFacts], bool]) -> str:
    """Returns the names of the schemes that a fact holds for, for messages: "a, b or c"."""
    return one_of([name for name, row in SCHEMES.items() if fact(row)])
