"""Trials: how close a compressed model is to the one before, measured on rows that no final figure is made on.

What changes is put in place in memory and taken out again. Closeness is

    classification  mean over rows of KL(p || p') = sum_c p_c (log p_c - log p'_c),   p = softmax of the logits before, p' after
    regression      mean over rows of (y - y')^2
    generation      mean over tokens of that KL; on as many blocks of full length as `LOGIT_BYTES` hold the logits of, one at least

The rows are selection rows, spread evenly over the split. Where there are none, calibration rows take their place; evaluation rows never
do. A choice under `auto` may add to a distance D that is there in any case

    bound = max(D / 4, floor),   floor = 1e-4 nats, or 1e-4 of the variance of the answers

which is a quarter of what int8 costs, or what nobody could measure.

Left out: the primary metric as a measure. It needs labels, and on some hundred rows it cannot tell apart what KL can.
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
"""Of the distance that int8 has in any case: what a choice under `auto` may add to it."""
ADDED_FLOOR = 1e-4
"""What it may add however small that distance is: nats, or for regression a share of the variance of the float answers."""
BATCH_SIZE = 32
LOGIT_BYTES = 2**26
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


def place(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Puts a layer into a model at a module path."""
    owner, _, child = name.rpartition(".")
    setattr(model.get_submodule(owner), child, layer)


@dataclass(frozen=True)
class Trial:
    """A model's answers to the trial rows, to compare those of its compressed forms with."""

    model: nn.Module
    prepared: Preprocessor
    """How the model takes its rows."""
    rows: Sequence[Row]
    context: Context
    logits: Array
    """Of the model as it was, float32 [n, C], or [n, L, V] for generation."""
    labels: Array | None = None
    """Of the rows; None where these are calibration rows."""

    @classmethod
    def prepare(cls, model: nn.Module, checkpoint: Path, calibration: Sequence[Row], context: Context) -> Self:
        """Asks the model as it is; calibration rows stand in where there is no selection row, which the log says."""

        split = context.data.selection
        rows, count = split.rows, TRIAL_ROWS
        labels: Array | None = split.labels
        if not rows:
            context.progress.log("  no selection rows: choices are made on calibration rows")
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
        """What `distance` returns: kl or mse."""
        return "mse" if TASKS[self.context.task].answer == "value" else "kl"

    def distance_of(self, forms: Mapping[str, nn.Module]) -> float:
        """Returns how far the model with other modules in the place of some, by path, is from what it was; it is left as it is."""
        with replaced(self.model, forms):
            return self.distance_now()

    def distance_now(self) -> float:
        """Returns how far the model as it is now is from what it was."""
        return sum(self._apart(numbers, logits) for numbers, logits in _logits(self.model, self.prepared, self.rows))

    def look(self) -> tuple[float, float | None]:
        """Returns the same, and the primary metric on these rows; None for rows without labels."""

        if self.labels is None:
            return self.distance_now(), None
        apart, answers = 0.0, []
        for numbers, logits in _logits(self.model, self.prepared, self.rows):
            apart += self._apart(numbers, logits)
            answers.append((numbers, self._kept(numbers, logits)))
        return apart, self._metric(gathered(answers, len(self.rows)))

    def metric_before(self) -> float | None:
        """Returns the primary metric of the model as it was; None for rows without labels."""
        return None if self.labels is None else self._metric(self._kept(range(len(self.rows)), self.logits))

    def _apart(self, numbers: Sequence[int], logits: Array) -> float:
        """Returns what some of the rows add to the distance."""
        return len(numbers) * distance(self.context.task, self.logits[numbers], logits) / len(self.rows)

    def _kept(self, numbers: Sequence[int], logits: Array) -> Array:

        return kept(self.prepared, [self.rows[number] for number in numbers], logits)

    def _metric(self, answers: Array) -> float:

        assert self.labels is not None
        return metrics(self.context.task, answers, self.labels)[TASKS[self.context.task].metric]

    def fewer(self, count: int) -> Self:
        """Returns the trial on at most `count` of its rows, spread evenly."""
        chosen = spread(range(len(self.rows)), count)
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, rows=[self.rows[index] for index in chosen], logits=self.logits[chosen], labels=labels)


def distance(task: Task, reference: Array, logits: Array) -> float:
    """Returns the mean KL divergence from the reference, in nats; for regression the mean squared error.

    Args:
        task: The task.
        reference: Logits `[n, C]`, or `[n, L, V]` for generation, whose mean is over tokens.
        logits: Of the same shape.
    """
    if TASKS[task].answer == "value":
        return float(np.mean((reference.astype(np.float64) - logits) ** 2))
    expected, found = _log_softmax(reference), _log_softmax(logits)
    return float(np.mean(np.sum(np.exp(expected) * (expected - found), axis=-1)))


def floor_of(task: Task, reference: Array) -> float:
    """Returns what a choice may add in any case, in the unit of `distance`; the arguments are those of `distance`."""
    return ADDED_FLOOR * (float(np.var(reference.astype(np.float64))) if TASKS[task].answer == "value" else 1.0)


def bound_of(before: float, floor: float) -> float:
    """Returns what a choice may add to the distance `before`."""
    return max(ADDED_SHARE * before, floor)


def spread(rows: Sequence[T], count: int) -> list[T]:
    """Returns `count` of the rows at equal distances, all of them where there are no more."""
    return [rows[index * len(rows) // count] for index in range(count)] if len(rows) > count else list(rows)


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalized: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalized


def _logits(model: nn.Module, prepared: Preprocessor, rows: Sequence[Row]) -> Iterator[tuple[list[int], Array]]:
    """Yields the indices of the rows of a batch and their logits; raises where the model answers NaN or infinity."""
    for indices, logits in logits_of(model, prepared, rows, BATCH_SIZE):
        bad = not_finite(logits)
        if len(bad):
            raise InputError(f"model: the answer to {len(bad)} of {len(indices)} rows is NaN or infinite; check its weights")
        yield indices, logits
