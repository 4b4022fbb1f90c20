"""Trials of quantized models: their layers in place of the float ones, in memory, as they are served (`compress.measure.closeness`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from compress.measure import closeness
from compress.measure.closeness import TRIAL_ROWS, distance, place, replaced, spread
from compress.schemes.scales import Scales

__all__ = ["TRIAL_ROWS", "Trial", "distance", "in_int8", "place", "replaced", "spread"]


def in_int8(model: nn.Module, layers: Mapping[str, nn.Linear], scales: Mapping[str, Scales]) -> AbstractContextManager[None]:
    """Puts the quantized forms of float layers into the model for as long as the block lasts; the float layers stay as they are."""
    return replaced(model, {name: scales[name].module(name, layer) for name, layer in layers.items()})


@dataclass(frozen=True)
class Trial(closeness.Trial):
    """A float model's answers to the trial rows, to compare those of its quantized forms with."""

    def distance(self, layers: Mapping[str, nn.Linear], scales: Mapping[str, Scales]) -> float:
        """Returns how far the model with these layers quantized is from what it was in float; it is left as it is."""
        return self.distance_of({name: scales[name].module(name, layer) for name, layer in layers.items()})
