"""Sensitivity: measures each layer's share of the quantization error.

It quantizes single layers, and it keeps single layers in float while all others are quantized. With D(S) the distance between the float
model and the model whose layers S are in int8 (`quantize.trial`: KL of the logits, or squared error for regression), and A the set of all
chosen layers:

    alone(l)     D({l})                  the cost of quantizing only l
    weights(l)   D({l}), with quantized weights and float inputs
    inputs(l)    D({l}), with quantized inputs and float weights
    gain(l)      D(A) - D(A without l)   the gain from keeping l in float while all others are int8

Layers are ranked by `gain`, as this is the decision of mixed precision; ties are broken by `alone`, then by model order. One-at-a-time
scans are the usual estimate (Wu et al. 2020, https://arxiv.org/abs/2004.09602, section 5.2). Not supported: interactions between pairs of
layers, which would take a quadratic number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from foundation.schemes.fp8 import Fp8Scales, to_e4m3
from foundation.schemes.int4_by_int8 import BlockScales, in_blocks
from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, DynamicScales, LayerScales, quantize, token_scale
from foundation.schemes.scales import Layer, Scales
from foundation.schemes.table import facts_of

SCAN_ROWS = 128
Part = Literal["both", "weights", "inputs"]
Measure = Callable[[Collection[str], Part], float]
"""Returns the distance from float with the given layers quantized: fully, or only their weights or inputs."""


@dataclass(frozen=True)
class Sensitivity:
    """The cost of int8 in one layer, in the unit of the distance (nats, or squared label units)."""

    name: str
    alone: float
    weights: float
    inputs: float
    gain: float
    """May be negative, from noise or errors that cancel."""

    def as_row(self) -> dict[str, object]:
        """Returns the fields as JSON types."""
        return asdict(self)


def scan(layers: Sequence[str], measure: Measure, advance: Callable[[int], None] = lambda _: None) -> list[Sensitivity]:
    """Measures every layer; 4 n + 1 passes over the trial rows for n layers.

    Args:
        layers: Names of the layers to quantize.
        measure: Returns the distance with some of them quantized.
        advance: Called after every pass.

    Returns:
        The layers, most sensitive first.
    """

    def measured(names: Collection[str], part: Part = "both") -> float:
        value = measure(names, part)
        advance(1)
        return value

    whole = measured(layers)
    found = [
        Sensitivity(
            name,
            alone=measured([name]),
            weights=measured([name], "weights"),
            inputs=measured([name], "inputs"),
            gain=whole - measured([other for other in layers if other != name]),
        )
        for name in layers
    ]
    return sorted(found, key=lambda layer: (-layer.gain, -layer.alone))


def passes(layers: Sequence[str]) -> int:
    """Returns the number of passes over the trial rows of a scan."""
    return 4 * len(layers) + 1


def quantized_part(name: str, layer: Layer, scales: Scales, part: Part) -> nn.Module:
    """Returns a quantized layer, or a float layer with only its weights or only its inputs rounded.

    Args:
        name: Module path, for error messages.
        layer: The float layer; not changed.
        scales: Its scales.
        part: What to round.
    """
    if part == "both":
        return scales.module(name, layer)
    weight_OI = scales.on_grid(layer.weight.detach()) if part == "weights" else layer.weight.detach()
    return _HalfQuantized(layer, weight_OI, scales if part == "inputs" else None)


class _HalfQuantized(nn.Module):
    """A float layer with another weight, whose input is rounded to its grid if scales are given."""

    def __init__(self, layer: Layer, weight_OI: Tensor, scales: Scales | None) -> None:
        super().__init__()
        self.layer, self.weight_OI, self.scales = layer, weight_OI, scales

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output of the layer."""
        x = x if self.scales is None else rounded_input(x, self.scales)
        y: Tensor = torch.func.functional_call(self.layer, {"weight": self.weight_OI}, (x,))
        return y


def rounded_input(x: Tensor, scales: Scales) -> Tensor:
    """Returns an input [..., I] rounded by its layer's scheme, with smoothing undone, in float32."""
    if facts_of(scales).activations == "float":
        return x
    match scales:
        case LayerScales() | DynamicScales():
            smooth_I = torch.ones(()) if scales.input_smooth is None else scales.input_smooth
            x = x * smooth_I.reciprocal()
            scale = scales.input_scale if isinstance(scales, LayerScales) else token_scale(x)
            return quantize(x, scale, ACTIVATION_LOW, ACTIVATION_HIGH).float() * scale * smooth_I
        case Fp8Scales():
            return to_e4m3(x, scales.input_scale).float() * scales.input_scale
        case BlockScales():
            return in_blocks(x, scales.group_size)
        case _:
            raise TypeError(f"no such scales: {type(scales).__name__}")


def summary(sensitivities: Sequence[Sensitivity], measure: str, rows: int) -> dict[str, object]:
    """Returns a scan as JSON types, for the manifest and the report."""
    return {"measure": measure, "rows": rows, "layers": [layer.as_row() for layer in sensitivities]}
