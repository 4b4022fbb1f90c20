"""Trials: the distance between a compressed model and the original, on rows that no reported metric uses.

Modules are replaced in memory for a trial and restored afterwards. The distance is

    classification  mean over rows of KL(p || p') = sum_c p_c (log p_c - log p'_c),   p = softmax of the original logits, p' of the
    compressed ones regression      mean over rows of (y - y')^2 generation      mean over tokens of that KL; on as many full-length blocks
    as have logits that fit in `LOGIT_BYTES`, at least one

The rows are spread evenly over the selection split; without a selection split they are calibration rows, never evaluation rows. If int8
alone causes a distance D, an `auto` choice may add at most

    bound = max(D / 4, floor),   floor = 1e-4 nats, or 1e-4 of the variance of the outputs for regression

a quarter of the cost of int8, or an amount too small to measure.

Not used as a distance: the primary metric. It needs labels, and on a few hundred rows it is less sensitive than KL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from compress.core.errors import InputError
from compress.core.tasks import TASKS, Task
from compress.measure.answers import gathered, kept, not_finite
from compress.measure.metrics import metrics
from compress.measure.predictions import finely, logits_of
from compress.stage.context import Context
from compress.standalone.preprocess import Preprocessor, Row

TRIAL_ROWS = 500
ADDED_SHARE = 0.25
"""Share of the distance of int8 that an `auto` choice may add."""
ADDED_FLOOR = 1e-4
"""Distance that it may always add: nats, or for regression a share of the variance of the float outputs."""
BATCH_SIZE = 32
LOGIT_BYTES = 2**26
Array = NDArray[Any]
T = TypeVar("T")


@contextmanager
def replaced(model: nn.Module, forms: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replaces the modules at some paths within the `with` block; the replaced modules are not modified."""
    originals = {name: model.get_submodule(name) for name in forms}
    for name, form in forms.items():
        place(model, name, form)
    try:
        yield
    finally:
        for name, module in originals.items():
            place(model, name, module)


def place(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Puts a layer into a model at a module path."""
    owner, _, child = name.rpartition(".")
    setattr(model.get_submodule(owner), child, layer)


@dataclass(frozen=True)
class Trial:
    """The logits of the original model on the trial rows, as reference for its compressed forms."""

    model: nn.Module
    prepared: Preprocessor
    """Preprocessor of the model."""
    rows: Sequence[Row]
    context: Context
    logits: Array
    """Logits of the original model, float32 [n, C], or [n, L, V] for generation."""
    labels: Array | None = None
    """Labels of the rows; None for calibration rows."""

    @classmethod
    def prepare(cls, model: nn.Module, checkpoint: Path, calibration: Sequence[Row], context: Context) -> Self:
        """Runs the original model on the trial rows; without a selection split, logs that calibration rows are used."""

        split = context.data.selection
        rows, count = split.rows, TRIAL_ROWS
        labels: Array | None = split.labels
        if not rows:
            context.progress.log("  no selection split: choices are made on calibration rows")
            rows, labels = list(calibration), None
        chosen = list(range(len(rows)))
        if TASKS[context.task].answer == "tokens":
            longest, config = max(len(row) for row in rows), cast("Any", model.config)
            chosen = [number for number, row in enumerate(rows) if len(row) == longest]
            count = max(1, min(TRIAL_ROWS, LOGIT_BYTES // (4 * longest * config.vocab_size)))
        chosen = spread(chosen, count)
        rows, labels = [rows[number] for number in chosen], None if labels is None else labels[chosen]
        prepared = finely(context.preprocessor(checkpoint))
        batches = sorted(_logits(model, prepared, rows), key=lambda batch: batch[0])
        order = np.concatenate([indices for indices, _ in batches])
        return cls(model, prepared, rows, context, np.concatenate([logits for _, logits in batches])[np.argsort(order)], labels)

    @property
    def measure(self) -> str:
        """The distance in use: kl or mse."""
        return "mse" if TASKS[self.context.task].answer == "value" else "kl"

    def distance_of(self, forms: Mapping[str, nn.Module]) -> float:
        """Returns the distance of the model with some modules replaced, by path; the model itself is restored."""
        with replaced(self.model, forms):
            return self.distance_now()

    def distance_now(self) -> float:
        """Returns the distance of the model in its current state from the original."""
        return sum(self._apart(numbers, logits) for numbers, logits in _logits(self.model, self.prepared, self.rows))

    def look(self) -> tuple[float, float | None]:
        """Returns the current distance and the primary metric on the trial rows; the metric is None for calibration rows."""

        if self.labels is None:
            return self.distance_now(), None
        apart, answers = 0.0, []
        for numbers, logits in _logits(self.model, self.prepared, self.rows):
            apart += self._apart(numbers, logits)
            answers.append((numbers, self._kept(numbers, logits)))
        return apart, self._metric(gathered(answers, len(self.rows)))

    def metric_before(self) -> float | None:
        """Returns the primary metric of the original model; None for calibration rows."""
        return None if self.labels is None else self._metric(self._kept(range(len(self.rows)), self.logits))

    def _apart(self, numbers: Sequence[int], logits: Array) -> float:
        """Returns the contribution of some rows to the distance."""
        return len(numbers) * distance(self.context.task, self.logits[numbers], logits) / len(self.rows)

    def _kept(self, numbers: Sequence[int], logits: Array) -> Array:

        return kept(self.prepared, [self.rows[number] for number in numbers], logits)

    def _metric(self, answers: Array) -> float:

        assert self.labels is not None
        return metrics(self.context.task, answers, self.labels)[TASKS[self.context.task].metric]

    def fewer(self, count: int) -> Self:
        """Returns a trial on at most `count` of the rows, evenly spread."""
        chosen = spread(range(len(self.rows)), count)
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, rows=[self.rows[index] for index in chosen], logits=self.logits[chosen], labels=labels)


def distance(task: Task, reference: Array, logits: Array) -> float:
    """Returns the mean KL divergence from the reference, in nats; for regression the mean squared error.

    Args:
        task: The task.
        reference: Logits `[n, C]`, or `[n, L, V]` for generation (mean over tokens).
        logits: Logits to compare, of the same shape.
    """
    if TASKS[task].answer == "value":
        return float(np.mean((reference.astype(np.float64) - logits) ** 2))
    expected, found = _log_softmax(reference), _log_softmax(logits)
    return float(np.mean(np.sum(np.exp(expected) * (expected - found), axis=-1)))


def floor_of(task: Task, reference: Array) -> float:
    """Returns the distance that a choice may always add, in the unit of `distance` and for the same arguments."""
    return ADDED_FLOOR * (float(np.var(reference.astype(np.float64))) if TASKS[task].answer == "value" else 1.0)


def bound_of(before: float, floor: float) -> float:
    """Returns how much a choice may add to the distance `before`."""
    return max(ADDED_SHARE * before, floor)


def spread(rows: Sequence[T], count: int) -> list[T]:
    """Returns `count` evenly spaced rows, or all rows if there are no more."""
    return [rows[index * len(rows) // count] for index in range(count)] if len(rows) > count else list(rows)


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalized: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalized


def _logits(model: nn.Module, prepared: Preprocessor, rows: Sequence[Row]) -> Iterator[tuple[list[int], Array]]:
    """Yields the indices of the rows of a batch and their logits; raises InputError if a logit is NaN or infinite."""
    for indices, logits in logits_of(model, prepared, rows, BATCH_SIZE):
        bad = not_finite(logits)
        if len(bad):
            raise InputError(f"model: the logits of {len(bad)} of {len(indices)} rows are NaN or infinite; check its weights")
        yield indices, logits
