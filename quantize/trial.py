"""Trials: measures the distance of a quantized model from the float one (`foundation.measure.closeness`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from foundation.core.arrays import Array
from foundation.measure import closeness
from foundation.measure.closeness import TRIAL_ROWS, distance, replaced
from foundation.schemes.scales import Layer, Scales

__all__ = ["TRIAL_ROWS", "Trial", "distance", "in_int8", "replaced"]


def in_int8(model: nn.Module, layers: Mapping[str, Layer], scales: Mapping[str, Scales]) -> AbstractContextManager[None]:
    """Replaces float layers of the model by their quantized versions within the `with` block; the float layers do not change."""
    return replaced(model, {name: scales[name].module(name, layer) for name, layer in layers.items()})


@dataclass(frozen=True)
class Trial(closeness.Trial):
    """Answers of a float model to the trial rows, as the reference for its quantized versions."""

    def distances(self, layers: Mapping[str, Layer], scales: Mapping[str, Scales]) -> Array:
        """Returns the distance of each row to float, float64 [n], of the model with these layers quantized; it does not change."""
        return self.distances_of({name: scales[name].module(name, layer) for name, layer in layers.items()})

    def distance(self, layers: Mapping[str, Layer], scales: Mapping[str, Scales]) -> float:
        """Returns the mean of `distances`."""
        return float(self.distances(layers, scales).mean())
