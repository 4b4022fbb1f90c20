"""The losses of units that a certificate is about: another answer than the original's, and an answer that is no longer right.

disagreement   1 where the answer of the whole row is another one, else 0; of a number or a vector where it is farther from the original's
               than `max_distance`
drop           right_original - right, -1, 0 or 1: its mean is the drop of the share of right answers
"""

from __future__ import annotations

import numpy as np

from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task, tasks_with

DROP_RANGE = (-1.0, 1.0)


def form_of(task: Task, key: str) -> str:
    """Returns the form of the scores of a task's answers (`foundation.standalone.confidence`).

    Args:
        task: The task.
        key: Key path of the stage, for the message.

    Raises:
        InputError: Its answers have no scores.
    """
    facts = TASKS[task]
    form = facts.confidence
    if form is not None:
        return form
    able = tasks_with(lambda row: row.confidence is not None)
    if facts.generates:
        raise InputError(
            key, f"given for {task}", f"a small model drafts and the original checks there (export.generation); {able} is allowed"
        )
    raise InputError(key, f"given for {task}, whose answers do not say how sure they are", f"{able} is allowed", "leave the stage out")


def disagreements(task: Task, original: Array, answers: Array, limit: float | None = None) -> Array:
    """Returns which rows are answered otherwise than by the original, bool `[n]`.

    Args:
        task: The task.
        original: Predictions of the original, float32 `[n, ...]`.
        answers: Predictions of another model, of the same shape.
        limit: Distance above which a number or a vector is another answer; None for answers that are the same or not.
    """
    if limit is not None:
        return np.asarray(TASKS[task].answer.apart(original, answers) > limit)
    return TASKS[task].answer.other_rows(original, answers)


def right(answers: Array, labels: Labels) -> Array:
    """Returns which rows are answered as their labels say, bool `[n]`: the whole set, or all tags, where there are several."""
    found = labels.pseudo_labels(answers).array == labels.array
    return np.asarray(found.reshape(len(found), -1).all(axis=1))


def drops(original: Array, answers: Array, labels: Labels) -> Array:
    """Returns the drop of each row, float64 `[n]`; see above."""
    return right(original, labels).astype(np.float64) - right(answers, labels)
