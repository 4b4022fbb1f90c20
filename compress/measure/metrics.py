"""Metrics of predictions against labels, and differences between the predictions of two models.

The standard metrics of each task, implemented in numpy (tests compare them with scikit-learn and SciPy):

    accuracy  = mean(argmax(logits) == y)                                            ties go to the lowest class
    f1        = 2 tp / (2 tp + fp + fn)        two classes: of class 1; more: mean over the classes that occur in predictions or labels
    matthews  = (c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2)(s^2 - sum_k t_k^2))  c correct, s rows, p_k predicted, t_k true counts
    pearson   = cov(x, y) / (sd(x) sd(y));  spearman = pearson of the ranks, ties share their average rank
    perplexity and accuracy of the next token: `compress.core.next_token`

An undefined metric (0 / 0: constant predictions have no correlation) is 0, so that it never looks good.
"""

from __future__ import annotations

import math

import numpy as np

from compress.core import next_token
from compress.core.errors import InputError
from compress.core.tasks import TASKS, Task
from compress.measure.answers import Array

PRIMARY: dict[Task, str] = {task: row.metric for task, row in TASKS.items()}
"""The primary metric of each task, used by goals and report."""


def metrics(task: Task, logits: Array, labels: Array) -> dict[str, float]:
    """Returns the metrics of a task; accuracy and F1 are fractions.

    Args:
        task: The task.
        logits: Float `[n, C]`; `[n, 1]` for regression; for generation `[n, T, 2]`, see `compress.core.next_token`.
        labels: Class ids `[n]`, values `[n]` for regression, or ids of the next tokens `[n, T]`.

    Raises:
        InputError: There are no rows.
    """
    if not len(labels):
        raise InputError("data: no row to evaluate; give at least one labelled row")
    assert len(logits) == len(labels), (logits.shape, labels.shape)
    if TASKS[task].answer == "tokens":
        return {"perplexity": next_token.perplexity(logits, labels), "accuracy": next_token.accuracy(logits, labels)}
    if TASKS[task].answer == "value":
        values = logits.reshape(len(labels))
        return {"pearson": pearson(values, labels), "spearman": spearman(values, labels)}
    answers = logits.argmax(axis=1)
    accuracy = float(np.mean(answers == labels))
    if task == "image-classification":
        return {"accuracy": accuracy}
    return {"accuracy": accuracy, "f1": f1(answers, labels, logits.shape[1]), "matthews": matthews(answers, labels)}


def f1(answers: Array, labels: Array, num_classes: int) -> float:
    """Returns F1 of class 1 for two classes, else the unweighted mean over the classes that occur in `answers` or `labels`."""
    if num_classes == 2:
        return _f1_of(answers == 1, labels == 1)
    return float(np.mean([_f1_of(answers == k, labels == k) for k in np.union1d(answers, labels)]))


def matthews(answers: Array, labels: Array) -> float:
    """Returns the Matthews correlation coefficient of any number of classes (Gorodkin 2004)."""
    num_classes = int(max(answers.max(), labels.max())) + 1
    answered = np.bincount(answers, minlength=num_classes).astype(np.float64)
    true = np.bincount(labels, minlength=num_classes).astype(np.float64)
    rows, correct = float(len(labels)), float(np.sum(answers == labels))
    spread = (rows**2 - float(answered @ answered)) * (rows**2 - float(true @ true))
    return _ratio(correct * rows - float(answered @ true), math.sqrt(spread))


def pearson(x: Array, y: Array) -> float:
    """Returns the linear correlation of two `[n]` arrays in float64; 0 if either is constant."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # the mean of equal values may differ from them by a rounding error
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    x, y = x / np.abs(x).max(), y / np.abs(y).max()  # squares of tiny or huge values would underflow or overflow
    return min(1.0, max(-1.0, _ratio(float(x @ y), math.sqrt(float(x @ x) * float(y @ y)))))


def spearman(x: Array, y: Array) -> float:
    """Returns the rank correlation of two `[n]` arrays."""
    return pearson(ranks(x), ranks(y))


def ranks(x: Array) -> Array:
    """Returns the ranks 1..n of an `[n]` array; equal values share the average of their ranks."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Array = (last - (counts - 1) / 2)[inverse]
    return mean


def num_predictions(labels: Array) -> int:
    """Returns the number of evaluated predictions: rows, or tokens for generation."""
    return int(np.sum(labels != next_token.IGNORED)) if labels.ndim == 2 else len(labels)


def differences(task: Task, reference: Array, answers: Array) -> tuple[Array, Array]:
    """Compares two sets of predictions for the same rows.

    Args:
        task: The task.
        reference: Logits `[n, C]`, or `[n, T, 2]` for generation.
        answers: Predictions to compare, of the same shape.

    Returns:
        Which predictions (rows or tokens) differ, bool `[N]`, all False for regression; and the absolute differences, float64 `[...]`, of
        all logits, or of the nll of every token.
    """
    if TASKS[task].answer == "tokens":
        before, after = next_token.choices(reference), next_token.choices(answers)
        predicted = before != next_token.NO_CHOICE
        return (before != after)[predicted], np.abs(answers[..., 0].astype(np.float64) - reference[..., 0])[predicted]
    distance = np.abs(answers.astype(np.float64) - reference)
    if TASKS[task].answer == "value":
        return np.zeros(len(reference), bool), distance
    return answers.argmax(axis=1) != reference.argmax(axis=1), distance


def _f1_of(answered: Array, true: Array) -> float:
    hits = float(np.sum(answered & true))
    return _ratio(2 * hits, float(np.sum(answered) + np.sum(true)))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
