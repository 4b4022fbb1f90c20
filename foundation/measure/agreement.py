"""Compares the predictions of two backends for the same rows, within the limits of `foundation.standalone.tolerance`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foundation.core.arrays import Array
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.standalone.tolerance import judge


def compare_predictions(task: Task, reference: Array, logits: Array, labels: Labels) -> dict[str, Any]:
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
    answer = TASKS[task].answer
    changed, distance = answer.differences(reference, logits)
    return {**judge(changed, distance / labels.unit(reference)), "differs": answer.DIFFERS}


def shortfall(compared: Mapping[str, object], other: str) -> str | None:
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
