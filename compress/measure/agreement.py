"""Compares the predictions of two backends for the same rows, within the limits of `compress.standalone.tolerance`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core import candidates
from compress.core.tasks import TASKS, Task
from compress.measure.metrics import differences
from compress.standalone.tolerance import judge

Array = NDArray[Any]
DIFFERS = {"tokens": "nll", "vector": "vector"}
"""What differences are of, by answer, where it is not a logit."""


def compare_predictions(task: Task, reference: Array, logits: Array, labels: Array) -> dict[str, Any]:
    """Compares predictions end to end.

    Args:
        task: Regression has no classes that could disagree; its differences are in standard deviations of the labels (`unit`).
        reference: Logits of one backend, float32 [n, C], or answers [n, T, 2] for generation: its predictions are tokens, its differences
            are of the nll.
        logits: Logits of the other one.
        labels: Labels of the evaluation split, of which the rows may be a part.

    Returns:
        `disagreements`, `limit`, `median_abs`, `median_limit`, `max_abs`, `n`, `passed`, and what differs: `logit`, `nll` or `vector`.
    """
    changed, distance = differences(task, reference, logits)
    return {**judge(changed, distance / unit(task, labels, reference)), "differs": differs_in(task)}


def differs_in(task: Task) -> str:
    """Returns what differences are of: `logit`, `nll` or `vector`."""
    return DIFFERS.get(TASKS[task].answer, "logit")


def unit(task: Task, labels: Array, reference: Array) -> float:
    """Returns the unit of differences: the standard deviation of the labels for regression, or where only the order of candidates counts
    that of the scores of the reference; else 1."""
    of = reference if candidates.are_candidates(labels) else labels
    spread = float(np.std(of.astype(np.float64))) if TASKS[task].answer == "value" else 1.0
    return spread if spread > 0 else 1.0


def shortfall(compared: Mapping[str, Any], other: str) -> str | None:
    """Returns in one line why two backends do not agree, None if they do.

    Args:
        compared: Result of `compare_predictions`.
        other: Name of the reference, for the message.
    """
    if compared["passed"]:
        return None
    return (
        f"{compared['disagreements']} of {compared['n']} predictions differ from {other} (at most {compared['limit']}), "
        f"median |d{compared['differs']}| {compared['median_abs']:.4f} (at most {compared['median_limit']})"
    )
