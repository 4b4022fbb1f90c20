"""Scores of models that ignore their input: below this floor a metric means nothing, and no goal is judged.

    constant   every row gets the same answer: the most frequent classes, labels from the most frequent one on, no entity, no answer, no
               word, the same score or vector, at every position the distribution of all tokens
    shuffled   every row gets the answer of another one: the mean of five orders

The better of both counts. A goal that this model meets too would be met by garbage: accuracy where one class holds nearly all rows, F1
where hardly a question has an answer, an order of candidates that is no better than the order they come in.
"""

from __future__ import annotations

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.measure.metrics import Metric, primary

ORDERS = 5
SHOWN_ZERO = 5e-5
"""Shares below this one are printed as 0.00 %."""


def chance(metric: Metric, answers: Array, labels: Labels) -> float:
    """Returns the metric of a model that knows nothing.

    Args:
        metric: The metric.
        answers: What a model of the task answers, `[n, ...]`; what it knows does not count.
        labels: Their labels.
    """
    found = [metric.of(*labels.values(one)) for one in labels.constants(answers)] if metric.constants else []
    if labels.SHUFFLED:
        draw = np.random.default_rng(0)
        shuffled = (labels.values(answers[draw.permutation(len(answers))]) for _ in range(ORDERS))
        found.append(float(np.mean([metric.of(*values) for values in shuffled])))
    return max(found) if metric.higher_is_better else min(found)


def nothing_right(task: Task, figures: dict[str, float], count: int) -> str | None:
    """Returns a warning where a model that others are compared with gets nothing right; None where it does.

    Args:
        task: The task.
        figures: Its metrics by name.
        count: Rows that they are of.
    """
    name, metric = TASKS[task].metric, primary(task)
    worst = metric.is_share and (figures[name] < SHOWN_ZERO if metric.higher_is_better else figures[name] >= 1)
    if not worst:
        return None
    cause = "do the labels of the data mean what the model's do, and are the columns the right ones?"
    return f"the baseline gets {name} {100 * figures[name]:.2f} % on {count} evaluation rows, as a model that knows nothing: {cause}"
