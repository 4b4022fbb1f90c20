"""Trials: how close a quantized model is to its float one, measured on rows that no final figure is made on.

The layers are put in place in memory as they will be served, in true int8, and taken out again. Closeness is

    classification  mean over rows of KL(p || p_int8) = sum_c p_c (log p_c - log p_int8_c),   p = softmax of the logits
    regression      mean over rows of (y - y_int8)^2

The rows are selection rows, spread evenly over the split. Where there are none, calibration rows take their place; evaluation rows never
do. Left out: the primary metric as a measure. It needs labels, and on some hundred rows it cannot tell apart what KL can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from compress.int8 import LayerScales, int8_linear
from compress.preprocess import Row
from compress.stage import Context, Task

TRIAL_ROWS = 500
BATCH_SIZE = 32
Array = NDArray[Any]
T = TypeVar("T")


@contextmanager
def replaced(model: nn.Module, forms: Mapping[str, nn.Module]) -> Iterator[None]:
    """Puts other modules in the place of those at some paths for as long as the block lasts; the modules themselves stay as they are."""
    kept = {name: model.get_submodule(name) for name in forms}
    for name, form in forms.items():
        place(model, name, form)
    try:
        yield
    finally:
        for name, module in kept.items():
            place(model, name, module)


def in_int8(model: nn.Module, layers: Mapping[str, nn.Linear], scales: Mapping[str, LayerScales]) -> AbstractContextManager[None]:
    """Puts the integer forms of float layers into the model for as long as the block lasts; the float layers stay as they are."""
    return replaced(model, {name: int8_linear(name, layer, scales[name]) for name, layer in layers.items()})


def place(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Puts a layer into a model at a module path."""
    owner, _, child = name.rpartition(".")
    setattr(model.get_submodule(owner), child, layer)


@dataclass(frozen=True)
class Trial:
    """A float model's answers to the trial rows, to compare those of its quantized forms with."""

    model: nn.Module
    checkpoint: Path
    rows: Sequence[Row]
    context: Context
    logits: Array
    """Of the model when it was float, float32 [n, C]."""

    @classmethod
    def prepare(cls, model: nn.Module, checkpoint: Path, calibration: Sequence[Row], context: Context) -> Trial:
        """Asks the float model; calibration rows stand in where there is no selection row, which the log says."""
        rows = context.data.selection.rows
        if not rows:
            context.progress.log("  no selection rows: choices are made on calibration rows")
            rows = list(calibration)
        rows = spread(rows, TRIAL_ROWS)
        return cls(model, checkpoint, rows, context, _predict(model, checkpoint, rows, context))

    @property
    def measure(self) -> str:
        """What `distance` returns: kl or mse."""
        return "mse" if self.context.task == "text-regression" else "kl"

    def distance(self, layers: Mapping[str, nn.Linear], scales: Mapping[str, LayerScales]) -> float:
        """Returns how far the model with these layers in int8 is from what it was in float; it is left as it is."""
        return self.distance_of({name: int8_linear(name, layer, scales[name]) for name, layer in layers.items()})

    def distance_of(self, forms: Mapping[str, nn.Module]) -> float:
        """Returns how far the model with other modules in the place of some, by path, is from what it was; it is left as it is."""
        with replaced(self.model, forms):
            logits = _predict(self.model, self.checkpoint, self.rows, self.context)
        return distance(self.context.task, self.logits, logits)

    def fewer(self, count: int) -> Trial:
        """Returns the trial on at most `count` of its rows, spread evenly."""
        chosen = spread(range(len(self.rows)), count)
        return replace(self, rows=[self.rows[index] for index in chosen], logits=self.logits[chosen])


def distance(task: Task, reference: Array, logits: Array) -> float:
    """Returns the mean KL divergence from the reference, in nats; for regression the mean squared error. Logits are `[n, C]`."""
    if task == "text-regression":
        return float(np.mean((reference.astype(np.float64) - logits) ** 2))
    expected, found = _log_softmax(reference), _log_softmax(logits)
    return float(np.mean(np.sum(np.exp(expected) * (expected - found), axis=1)))


def spread(rows: Sequence[T], count: int) -> list[T]:
    """Returns `count` of the rows at equal distances, all of them where there are no more."""
    return [rows[index * len(rows) // count] for index in range(count)] if len(rows) > count else list(rows)


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normalized: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalized


def _predict(model: nn.Module, checkpoint: Path, rows: Sequence[Row], context: Context) -> Array:
    from compress.data import preprocessor
    from compress.evaluate import predict

    return predict(model, preprocessor(checkpoint, context.task, context.max_length, context.target), rows, BATCH_SIZE)
