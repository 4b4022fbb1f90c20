"""Compares the answers of the server with the evaluated engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foundation.artifacts.triton import TritonModel
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.measure.answers import load_logits

if TYPE_CHECKING:
    from triton_repo.client import Answers
    from triton_repo.layout import Served


def compare(model: Served, task: Task, answers: Answers, labels: Labels) -> TritonModel:
    """Checks the labels of the server against its logits, and its logits against the engine's.

    Args:
        model: The model.
        task: For regression, differences are in standard deviations of the labels, and there are no classes to compare.
        answers: The answers of the server.
        labels: Labels of the evaluation split.

    Returns:
        Its entry in triton.json with `disagreements` (rows whose label differs from the engine's), `median_abs` and `max_abs` (of logit
        differences); all None if the predictions of the engine are not known.

    Raises:
        ServedWrong: A difference exceeds its limit.
    """
    from foundation.measure.agreement import compare_predictions, shortfall
    from triton_repo.client import ServedWrong

    wrong = answers.contradiction(model.prepared)
    if wrong is not None:
        raise ServedWrong(f"model {model.name}: {wrong}")
    if model.predictions is None:
        return model.entry.with_(disagreements=None, median_abs=None, max_abs=None)
    expected, own = load_logits(model.predictions), labels.of_tower(model.tower)
    expected, labels = expected[own], labels[own]
    logits = answers.stored_predictions(model.prepared)
    compared = compare_predictions(task, expected, logits, labels)
    reason = shortfall(compared, "the evaluated engine")
    if reason is not None:
        changed = TASKS[task].answer.differences(expected, logits)[0]
        other = np.flatnonzero(changed)[: len(logits) if len(changed) == len(logits) else 0]  # words have no row
        raise ServedWrong(f"model {model.name} in Triton: {reason}" + (f"; first row {other[0]}" if len(other) else ""))
    return model.entry.with_(**{key: compared[key] for key in ("disagreements", "median_abs", "max_abs")})


def agreement(compared: TritonModel, task: Task) -> str:
    """Returns in words how far a server is from the engine."""
    if compared.disagreements is None:
        return "not compared with the engine"
    return f"{compared.disagreements} answers differ from the engine, max |d{TASKS[task].answer.DIFFERS}| {compared.max_abs:.4f}"
