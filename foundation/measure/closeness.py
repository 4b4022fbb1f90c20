"""Trials: the distance between a compressed model and the original, on rows that no reported metric uses.

Modules are replaced in memory for a trial and restored afterwards. The distance is

    classification  mean over rows of KL(p || p') = sum_c p_c (log p_c - log p'_c), p = softmax of the original logits, p' of the
                    compressed ones
    regression      mean over rows of (y - y')^2
    vectors         mean over rows of |v - v'|^2 / |v|^2, which is 2 - 2 cos(v, v') for vectors of length 1
    generation      mean over tokens of that KL, on blocks of full length; of encoder-decoders over the tokens of the target

The rows are spread evenly over the selection split; without a selection split they are calibration rows, never evaluation rows. A language
model takes as many blocks as have logits that fit in `LOGIT_BYTES`, and at least `LEAST_BLOCKS`. Its logits are never held for more than
one batch: what its head read from the original model is held instead, float [n, L, D], and the head computes the original logits again
next to the compressed model. This needs the head to stay as it is.

The distance d_i of each row gives a 95 % interval of the mean m. A row is a whole block for generation, as its tokens depend on each
other. Rows that belong together (`foundation.data.groups`) count as groups g = 1 ... G. Of a group e_g is the sum of d_i - m:

    m +- t se,   se^2 = G / (G - 1) sum_g e_g^2 / n^2       t: Student's, with G_e - 1 degrees of freedom (`foundation.core.resampling`)

which is t s / sqrt(n) for independent rows. Two models are compared by the interval of the differences row by row, which is much
narrower. An `auto` choice departs from its default only if that interval says so (`closer`, `interval`).

If int8 alone causes a distance D, an `auto` choice may add at most

    bound = max(D / 4, floor),   floor = 1e-4 nats, 1e-4 of the variance of the outputs for regression, or 1e-4 for vectors

a quarter of the cost of int8, or an amount too small to measure.

Not used as a distance: the primary metric. It needs labels, and on a few hundred rows it is less sensitive than KL.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from torch import nn

from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.core.resampling import Groups, each_alone, student
from foundation.core.spread import spread
from foundation.data.groups import groups_of_rows, groups_of_split
from foundation.labels.answer import LOGIT_BYTES
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.measure.answers import compressed, gathered, not_finite
from foundation.measure.metrics import metrics
from foundation.measure.predictions import finely, logits_of
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor, Row, TokenPair

TRIAL_ROWS = 500
ADDED_SHARE = 0.25
"""Share of the distance of int8 that an `auto` choice may add."""
ADDED_FLOOR = 1e-4
"""Distance that it may always add: nats, or for regression a share of the variance of the float outputs."""
BATCH_SIZE = 32
LEAST_BLOCKS = 64
"""Fewest blocks of a language model that a choice rests on, if the split has them."""
K = TypeVar("K")


@contextmanager
def replaced(model: nn.Module, forms: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replaces the modules at some paths within the `with` block; the replaced modules are not modified."""
    originals = {name: model.get_submodule(name) for name in forms}
    for name, form in forms.items():
        model.set_submodule(name, form)
    try:
        yield
    finally:
        for name, module in originals.items():
            model.set_submodule(name, module)


@dataclass(frozen=True)
class Trial:
    """The outputs of the original model on the trial rows, as reference for its compressed forms."""

    model: nn.Module
    prepared: Preprocessor
    """Preprocessor of the model."""
    rows: Sequence[Row]
    context: Context
    answers: Array
    """Predictions of the original model (`foundation.measure.answers.compressed`): logits float32 [n, C], or [n, T, 2] for generation."""
    read: Array | None = None
    """For generation, what the head of the original model read, float32 [n, L, D]; else None."""
    labels: Labels | None = None
    """Labels of the rows; None for calibration rows."""
    groups: Groups | None = None
    """Groups of rows that belong together; None if each row is its own group."""

    @classmethod
    def prepare(cls, model: nn.Module, checkpoint: Path, calibration: Sequence[Row], context: Context) -> Self:
        """Runs the original model on the trial rows; without a selection split, logs that calibration rows are used."""

        split = context.data.selection
        rows, count = split.rows, TRIAL_ROWS
        labels: Labels | None = split.labels
        numbers_of_groups = groups_of_split(split) if rows else groups_of_rows(calibration)
        if not rows:
            context.progress.log("  no selection split: choices are made on calibration rows")
            rows, labels = list(calibration), None
        chosen = list(range(len(rows)))
        generates, prepared = context.facts.generates, finely(context.preprocessor(checkpoint))
        if generates:
            longest, config = max(len(row) for row in rows), cast("Any", model.config)
            if context.facts.encoder_decoder:  # pairs are of all lengths: all are padded to the longest
                prepared = replace(prepared, buckets=prepared.buckets[bisect_left(prepared.buckets, longest) :][:1])
            else:
                chosen = [number for number, row in enumerate(rows) if len(row) == longest]
            count = max(LEAST_BLOCKS, min(TRIAL_ROWS, LOGIT_BYTES // (4 * longest * config.vocab_size)))
        chosen = spread(chosen, count) if labels is None else [chosen[row] for row in labels[chosen].sample(count)]
        rows, labels = [rows[number] for number in chosen], None if labels is None else labels[chosen]
        listening: AbstractContextManager[list[Array]] = heard(model) if generates else nullcontext([])
        with listening as read:
            found = [
                (numbers, compressed(prepared, [rows[number] for number in numbers], logits))
                for numbers, logits in _logits(model, prepared, rows)
            ]
        inputs = gathered(((numbers, given) for (numbers, _), given in zip(found, read, strict=True)), len(rows)) if generates else None
        return cls(model, prepared, rows, context, gathered(found, len(rows)), inputs, labels, Groups(numbers_of_groups[chosen]))

    @property
    def measure(self) -> str:
        """The distance in use: kl, mse, or for vectors squared_distance."""
        return self.context.facts.answer.DISTANCE

    def distances_of(self, forms: Mapping[str, nn.Module]) -> Array:
        """Returns the distance of each row, float64 [n], of the model with some modules replaced, by path; the model is restored."""
        with replaced(self.model, forms):
            return self.distances_now()

    def distances_now(self) -> Array:
        """Returns the distance of each row, float64 [n], of the model in its current state from the original."""
        apart = np.zeros(len(self.rows))
        for numbers, expected, logits in self._pairs():
            apart[numbers] = self._apart(numbers, expected, logits)
        return apart

    def _apart(self, numbers: Sequence[int], expected: Array, logits: Array) -> Array:
        """Returns the distance of each row of a batch."""
        rows = [self.rows[number] for number in numbers]
        predicted = [len(row.target) for row in rows if isinstance(row, TokenPair)]
        return distances(self.context.task, expected, logits, np.array(predicted) if predicted else None)

    def distance_now(self) -> float:
        """Returns the mean of `distances_now`."""
        return float(self.distances_now().mean())

    def look(self) -> tuple[float, float | None]:
        """Returns the current distance and the primary metric on the trial rows; the metric is None for calibration rows."""

        if self.labels is None:
            return self.distance_now(), None
        apart, answers = np.zeros(len(self.rows)), []
        for numbers, expected, logits in self._pairs():
            apart[numbers] = self._apart(numbers, expected, logits)
            answers.append((numbers, logits if self.read is None else self._stored(numbers, logits)))
        return float(apart.mean()), self._metric(gathered(answers, len(self.rows)))

    def metric_before(self) -> float | None:
        """Returns the primary metric of the original model; None for calibration rows."""
        return None if self.labels is None else self._metric(self.answers)

    def _pairs(self) -> Iterator[tuple[list[int], Array, Array]]:
        """Yields for each batch the numbers of its rows, the original logits and the current ones, in the form of `answers` or `read`."""
        if self.read is None:
            for numbers, logits in _logits(self.model, self.prepared, self.rows):
                yield numbers, self.answers[numbers], self._stored(numbers, logits)
            return
        batches = [numbers for numbers, _ in self.prepared.batches(self.rows, BATCH_SIZE)]
        for numbers in batches:
            with beside(self.model, self.read[numbers]):
                ((order, both),) = _logits(self.model, self.prepared, [self.rows[number] for number in numbers])
            yield numbers, both[len(numbers) :], both[: len(numbers)][np.argsort(order)]

    def _stored(self, numbers: Sequence[int], logits: Array) -> Array:
        return compressed(self.prepared, [self.rows[number] for number in numbers], logits)

    def _metric(self, answers: Array) -> float:

        assert self.labels is not None
        return metrics(self.context.task, answers, self.labels)[self.context.facts.metric]

    def fewer(self, count: int) -> Self:
        """Returns a trial on at most `count` of the rows, evenly spread."""
        chosen = spread(range(len(self.rows)), count) if self.labels is None else self.labels.sample(count)
        labels, read = None if self.labels is None else self.labels[chosen], None if self.read is None else self.read[chosen]
        groups = None if self.groups is None else Groups(self.groups.numbers[chosen])
        rows = [self.rows[index] for index in chosen]
        return replace(self, rows=rows, answers=self.answers[chosen], read=read, labels=labels, groups=groups)


@contextmanager
def heard(model: nn.Module) -> Iterator[list[Array]]:
    """Yields a list that each forward pass of a language model appends the inputs of its head to, float32 [b, L, D]."""
    inputs: list[Array] = []
    handle = head_of(model).register_forward_pre_hook(lambda head, args: inputs.append(args[0].float().cpu().numpy()))
    try:
        yield inputs
    finally:
        handle.remove()


@contextmanager
def beside(model: nn.Module, read: Array) -> Iterator[None]:
    """Lets the head of a language model read other inputs [b, L, D] too: the logits of these rows then follow the others."""
    given = torch.from_numpy(np.ascontiguousarray(read))
    handle = head_of(model).register_forward_pre_hook(lambda head, args: (torch.cat([args[0], given.to(args[0])]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def head_of(model: nn.Module) -> nn.Module:
    """Returns the head of a language model; raises InputError if it has none."""
    head: nn.Module | None = cast("Any", model).get_output_embeddings()
    if head is None:
        raise InputError("model", f"{type(model).__name__} has no language model head", "a causal language model with one is needed")
    return head


def distance(task: Task, reference: Array, logits: Array) -> float:
    """Returns the mean KL divergence from the reference, in nats; for regression the mean squared error, for vectors a relative one.

    Args:
        task: The task.
        reference: Logits `[n, C]`, or `[n, L, V]` for generation (mean over tokens).
        logits: Logits to compare, of the same shape.
    """
    return float(np.mean(distances(task, reference, logits)))


def distances(task: Task, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
    """Returns the distance of each row, float64 [n].

    Args:
        task: As for `distance`.
        reference: As for `distance`.
        logits: As for `distance`.
        predicted: For generation, the positions of each row that count, from the first on, int [n]; None: all.
    """
    return TASKS[task].answer.distances(reference, logits, predicted)


def interval(values: Array, groups: Groups | None = None) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of `values` [n]; unbounded if they are all of one group.

    Args:
        values: Distances, or differences of distances on the same rows.
        groups: Which of them belong together; None: each row is its own group.
    """
    groups = each_alone(len(values)) if groups is None else groups
    mean, count = float(np.mean(values)), len(groups)
    if count < 2:
        return -math.inf, math.inf
    sums = np.bincount(np.unique(groups.numbers, return_inverse=True)[1], weights=values - mean)
    error = math.sqrt(count / (count - 1) * float(sums @ sums)) / len(values)
    half = student(groups.effective) * error
    return mean - half, mean + half


def closer(apart: Mapping[K, Array], default: K, groups: Groups | None = None) -> K:
    """Returns which candidate to take, by its distances [n] on the same rows: the nearest that is nearer than the default.

    A candidate counts as nearer if the whole 95 % interval of the difference, row by row, says so; if none does, the default stays.
    """
    nearer = [name for name in apart if name != default and interval(apart[name] - apart[default], groups)[1] < 0]
    return min(nearer, key=lambda name: float(apart[name].mean()), default=default)


def bounds(values: Array, groups: Groups | None = None) -> list[float] | None:
    """Returns the 95 % interval of the mean as JSON; None where it is unbounded."""
    low, high = interval(values, groups)
    return [low, high] if math.isfinite(low) else None


def in_words(values: Array, groups: Groups | None = None) -> str:
    """Returns the mean of distances [n] with its 95 % interval, for the log."""
    low, high = interval(values, groups)
    return f"{float(np.mean(values)):.2g} (95 % {low:.2g} to {high:.2g})"


def floor_of(task: Task, reference: Array) -> float:
    """Returns the distance that a choice may always add, in the unit of `distance` and for the same arguments."""
    return ADDED_FLOOR * TASKS[task].answer.normalizer(reference)


def bound_of(before: float, floor: float) -> float:
    """Returns how much a choice may add to the distance `before`."""
    return max(ADDED_SHARE * before, floor)


def _logits(model: nn.Module, prepared: Preprocessor, rows: Sequence[Row]) -> Iterator[tuple[list[int], Array]]:
    """Yields the indices of the rows of a batch and their logits; raises InputError if a logit is NaN or infinite."""
    for indices, logits in logits_of(model, prepared, rows, BATCH_SIZE):
        bad = not_finite(logits)
        if len(bad):
            raise InputError("model", f"the logits of {len(bad)} of {len(logits)} rows are NaN or infinite", remedy="check its weights")
        yield indices, logits
