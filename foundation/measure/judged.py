"""The metric that goals are judged on: the primary one of the task, or the one that `goals.metric` names.

    NAME            another metric of the task (`foundation.labels.tasks`), such as f1 or matthews
    KIND:LABEL      a figure of one class, with predictions P and rows T of that class

        recall:LABEL     |P and T| / |T|
        precision:LABEL  |P and T| / |P|
        f1:LABEL         2 |P and T| / (|P| + |T|)

A figure of a class whose divisor is 0 is 0. A model that always answers a class has all of its recall, so the floor of `recall:LABEL`
(`foundation.measure.chance`) comes only from shuffled answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from foundation.core.arrays import Array
from foundation.core.errors import InputError, Problem, nearest
from foundation.labels.classes import ClassIds
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.measure.answers import load_predictions
from foundation.measure.metrics import METRICS, Made, Metric, metric_of

Counts = Callable[[float, float, float], tuple[float, float]]
"""Numerator and divisor of a figure, given hits, predictions and true rows of a class."""
OF_CLASS: Mapping[str, Counts] = {
    "recall": lambda hits, predicted, true: (hits, true),
    "precision": lambda hits, predicted, true: (hits, predicted),
    "f1": lambda hits, predicted, true: (2 * hits, predicted + true),
}
SEPARATOR = ":"


@dataclass(frozen=True)
class Judged:
    """A metric by its name."""

    task: Task
    name: str
    metric: Metric

    def figure(self, figures: Mapping[str, float], predictions: Path) -> float:
        """Returns its value: one of `figures`, else from a file of predictions (`foundation.measure.answers`)."""
        if self.name in figures:
            return figures[self.name]
        logits, labels = load_predictions(predictions, self.task)
        return self.metric.of(*labels.values(logits))


def num_predictions(task: Task, metric: str | None, true: Labels, labels: Sequence[str]) -> int | None:
    """Counts the predictions that the judged metric is a share of, for the recall of a class the rows of this class; None for other
    metrics, such as a correlation.

    Args:
        task: The task.
        metric: `goals.metric`; None: the primary metric.
        true: The labels of the judged rows.
        labels: Names of the classes.

    Raises:
        InputError: The task has no such metric, or the data no such class.
    """
    judged = judged_of(task, metric, labels)
    kind, _, label = judged.name.partition(SEPARATOR)
    if kind == "recall" and label and isinstance(true, ClassIds):
        return int(np.count_nonzero(true.array == list(labels).index(label)))
    return true.count() if judged.metric.is_share else None


def judged_of(task: Task, metric: str | None, labels: Sequence[str]) -> Judged:
    """Returns the metric that is judged.

    Args:
        task: The task.
        metric: `goals.metric`; None: the primary metric.
        labels: Names of the classes.

    Raises:
        InputError: The task has no such metric, or the data no such class.
    """
    name = metric or TASKS[task].metric
    problem = problem_with(task, metric)
    if problem is None and name not in METRICS and name.partition(SEPARATOR)[2] not in labels:
        given = name.partition(SEPARATOR)[2]
        allowed = f"{', '.join(labels)} is allowed{nearest(given, labels)}"
        problem = Problem("goals.metric", f"the class {given!r} given", allowed)
    if problem is not None:
        raise InputError.of([problem])
    if name in METRICS:
        return Judged(task, name, metric_of(task, name))
    kind, _, label = name.partition(SEPARATOR)
    number = list(labels).index(label)
    of, made_of = partial(_of_class, task, OF_CLASS[kind], number), partial(_rows_of_class, task, kind, number)
    return Judged(task, name, replace(_OF_ONE, of=of, made_of=made_of, constants=kind != "recall"))


def problem_with(task: Task, metric: str | None) -> Problem | None:
    """Returns why a task has no metric of that name, whatever its classes are; None where it has."""
    row = TASKS[task]
    if metric is None or metric in row.metrics:
        return None
    kind, separator, label = metric.partition(SEPARATOR)
    if row.answer.JUDGES_CLASSES and separator and kind in OF_CLASS and label:
        return None
    allowed = judgeable(task)
    return Problem("goals.metric", f"{metric!r} given", f"{', '.join(allowed)} is allowed for {task}{nearest(metric, allowed)}")


def judgeable(task: Task) -> list[str]:
    """Returns every value of `goals.metric` for a task, the primary metric first; `recall:LABEL` stands for one of each class."""
    row = TASKS[task]
    return [*row.metrics, *(f"{name}{SEPARATOR}LABEL" for name in OF_CLASS if row.answer.JUDGES_CLASSES)]


def known_metric(name: str | None) -> Metric | None:
    """Returns how to format and compare a metric of a report: a row of `METRICS`, or for a figure of a class one that cannot compute it;
    None for names of other versions."""
    if name is None or name in METRICS:
        return None if name is None else METRICS[name]
    kind, separator, _ = name.partition(SEPARATOR)
    return _OF_ONE if separator and kind in OF_CLASS else None


def _unnamed(answers: Array, labels: Array) -> float:
    raise AssertionError("the number of the class is not known here; judged_of makes the metric")


_OF_ONE = Metric(_unnamed, is_share=True)


def _of_class(task: Task, counts: Counts, number: int, answers: Array, true: Array) -> float:
    """Returns a figure of class `number` of what `Labels.values` returned."""
    predicted, own = TASKS[task].answer.has_class(answers, true, number)
    numerator, divisor = counts(*(float(np.sum(rows)) for rows in (predicted & own, predicted, own)))
    return numerator / divisor if divisor else 0.0


def _rows_of_class(task: Task, kind: str, number: int, answers: Array, true: Array) -> Made:
    """Returns the rows that a figure of class `number` is made of."""
    predicted, own = TASKS[task].answer.has_class(answers, true, number)
    return {"recall": Made(own), "precision": Made(predicted), "f1": Made(predicted | own, is_f1=True)}[kind]
