"""Sensitivity: how much of the damage of int8 each layer does, found by quantizing layers one at a time and by leaving one out.

With D(S) the distance between the float model and the model whose layers S are in int8 (`quantize.trial`: KL of the logits, or squared
error for regression), and A the set of all layers chosen:

    alone(l)     D({l})                  what l costs when it is the only one
    weights(l)   D({l}), its weights rounded and its input left in float
    inputs(l)    D({l}), its input rounded and its weights left in float
    gain(l)      D(A) - D(A without l)   what float in l wins back when all others are int8

Layers are ranked by `gain`, because that is the decision that mixed precision takes; `alone` breaks ties, then the order of the model.
One-at-a-time scans are the usual estimate (Wu et al. 2020, https://arxiv.org/abs/2004.09602, section 5.2). Left out: interactions
between pairs of layers, which would take a quadratic number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.schemes.fp8 import Fp8Scales, to_e4m3
from compress.schemes.int4 import Int4Scales
from compress.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, DynamicScales, LayerScales, quantize, token_scale
from compress.schemes.scales import Scales

SCAN_ROWS = 128
Part = Literal["both", "weights", "inputs"]
Measure = Callable[[Collection[str], Part], float]
"""Returns the distance from float with some layers quantized: wholly, or only their weights or their inputs."""


@dataclass(frozen=True)
class Sensitivity:
    """What int8 costs in one layer, in the unit of the distance (nats, or squared label units)."""

    name: str
    alone: float
    weights: float
    inputs: float
    gain: float
    """May be negative: noise, or errors that cancel."""

    def as_row(self) -> dict[str, Any]:
        """Returns it as JSON types."""
        return asdict(self)


def scan(layers: Sequence[str], measure: Measure, advance: Callable[[int], None] = lambda _: None) -> list[Sensitivity]:
    """Measures every layer; 4 n + 1 passes over the trial rows for n layers.

    Args:
        layers: Names of the layers that are to become int8.
        measure: The distance with some of them quantized.
        advance: Is told of every pass.

    Returns:
        The layers, the one that costs most first.
    """

    def taken(names: Collection[str], part: Part = "both") -> float:
        value = measure(names, part)
        advance(1)
        return value

    whole = taken(layers)
    found = [
        Sensitivity(
            name,
            alone=taken([name]),
            weights=taken([name], "weights"),
            inputs=taken([name], "inputs"),
            gain=whole - taken([other for other in layers if other != name]),
        )
        for name in layers
    ]
    return sorted(found, key=lambda layer: (-layer.gain, -layer.alone))


def passes(layers: Sequence[str]) -> int:
    """Returns how many passes over the trial rows a scan takes."""
    return 4 * len(layers) + 1


def quantized_part(name: str, linear: nn.Linear, scales: Scales, part: Part) -> nn.Module:
    """Returns a quantized layer, or one of which only the weights or only the inputs are rounded, in float arithmetic.

    Args:
        name: Module path, for messages.
        linear: The float layer; stays as it is.
        scales: Its scales.
        part: What to round.
    """
    if part == "both":
        return scales.module(name, linear)
    weight_OI = scales.on_grid(linear.weight.detach()) if part == "weights" else linear.weight.detach()
    bias_O = None if linear.bias is None else linear.bias.detach()
    return _HalfQuantized(weight_OI, bias_O, scales if part == "inputs" else None)


class _HalfQuantized(nn.Module):
    """A linear layer in float whose input is rounded to its grid where scales are given."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, scales: Scales | None) -> None:
        super().__init__()
        self.weight_OI, self.bias_O, self.scales = weight_OI, bias_O, scales

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I]."""
        return nn.functional.linear(x if self.scales is None else rounded_input(x, self.scales), self.weight_OI, self.bias_O)


def rounded_input(x: Tensor, scales: Scales) -> Tensor:
    """Returns an input [..., I] as the scheme of its layer rounds it, its smoothing taken out again, in float32."""
    match scales:
        case LayerScales() | DynamicScales():
            smooth_I = torch.ones(()) if scales.input_smooth is None else scales.input_smooth
            x = x * smooth_I.reciprocal()
            scale = scales.input_scale if isinstance(scales, LayerScales) else token_scale(x)
            return quantize(x, scale, ACTIVATION_LOW, ACTIVATION_HIGH).float() * scale * smooth_I
        case Fp8Scales():
            return to_e4m3(x, scales.input_scale).float() * scales.input_scale
        case Int4Scales():
            return x
        case _:
            raise TypeError(f"no such scales: {type(scales).__name__}")


def summary(found: Sequence[Sensitivity], measure: str, rows: int) -> dict[str, Any]:
    """Returns a scan as JSON types, for the manifest and the report."""
    return {"measure": measure, "rows": rows, "layers": [layer.as_row() for layer in found]}
