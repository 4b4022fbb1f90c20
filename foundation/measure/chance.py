"""What a model gets that knows nothing: the floor below which a metric says nothing, and under which no goal is judged.

    constant   every row gets the same answer: the most frequent classes, labels from the most frequent one on, no entity, no answer, no
               word, the same score or vector, at every position the distribution of all tokens
    shuffled   every row gets the answer of another one: the mean of five orders

The better of both counts. A goal that this model meets too would be met by garbage: accuracy where one class holds nearly all rows, F1
where hardly a question has an answer, an order of candidates that is no better than the order they come in.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foundation.core.arrays import Array
from foundation.core.forms import label_sets, next_token, spans, zero_shot
from foundation.core.tasks import TASKS, Task
from foundation.measure.metrics import Metric, primary

ORDERS = 5
MOST_CLASSES = 5
"""Classes, the most frequent ones, that are tried as the one answer."""
SHOWN_ZERO = 5e-5
"""Shares below this one are printed as 0.00 %."""


def chance(metric: Metric, answers: Array, labels: Array) -> float:
    """Returns the metric of a model that knows nothing.

    Args:
        metric: The metric.
        answers: What a model of the task answers, `[n, ...]`; what it knows does not count.
        labels: `[n, ...]`.
    """
    found = [metric.of(one, labels) for one in constants(answers, labels)] if metric.constants else []
    if not next_token.are_tokens(labels):  # answers hold the loss of the true token, so that no other row can have them
        draw = np.random.default_rng(0)
        found.append(float(np.mean([metric.of(answers[draw.permutation(len(answers))], labels) for _ in range(ORDERS)])))
    return max(found) if metric.higher_is_better else min(found)


def constants(answers: Array, labels: Array) -> Iterator[Array]:
    """Yields answers in the form of `answers`, the same for all rows."""
    if next_token.are_tokens(labels):
        yield _same_distribution(answers, labels)
    elif zero_shot.are_images_and_texts(labels):
        yield np.zeros_like(answers)
        yield from _same_class(answers, labels)
    elif label_sets.are_sets(labels):
        order = np.argsort(-labels.mean(axis=0), kind="stable")
        for count in range(1, len(order) + 1):
            yield np.tile(np.where(np.isin(np.arange(len(order)), order[:count]), 1.0, -1.0), (len(labels), 1))
    elif labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        for known in np.argsort(-np.bincount(labels), kind="stable")[:MOST_CLASSES]:
            yield np.tile(np.arange(answers.shape[1]) == known, (len(labels), 1)).astype(np.float32)
    else:
        yield np.zeros_like(answers)
        if spans.are_spans(labels):
            none = np.zeros_like(answers)
            none[:, spans.Part.NULL] = 1
            yield none


def _same_distribution(answers: Array, labels: Array) -> Array:
    """Returns the answers of the model that gives every token its share of all tokens."""
    predicted = labels != next_token.IGNORED
    tokens, which, counts = np.unique(labels[predicted], return_inverse=True, return_counts=True)
    made = np.zeros_like(answers)
    made[predicted, 0] = -np.log(counts / counts.sum())[which]
    made[predicted, 1] = tokens[counts.argmax()]
    return made


def _same_class(answers: Array, labels: Array) -> Iterator[Array]:
    """Yields vectors where every image is a text of one class; of captions every image is one caption."""
    texts, images = (np.flatnonzero(labels[:, 0] == side) for side in (zero_shot.TEXT, zero_shot.IMAGE))
    classes, counts = np.unique(labels[images, 1], return_counts=True)
    for known in classes[np.argsort(-counts, kind="stable")[:MOST_CLASSES]]:
        own = texts[labels[texts, 1] == known]
        if len(own):
            made = answers.copy()
            made[images] = answers[own].mean(axis=0)
            yield made


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
