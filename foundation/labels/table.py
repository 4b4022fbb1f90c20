"""The table of answers."""

from __future__ import annotations

from collections.abc import Mapping

from foundation.core.arrays import Array
from foundation.core.tasks import TASKS, Task
from foundation.labels.answer import Answer
from foundation.labels.classes import ClassAnswer
from foundation.labels.form import Labels
from foundation.labels.label_sets import SetAnswer
from foundation.labels.next_token import TokenAnswer
from foundation.labels.spans import SpanAnswer
from foundation.labels.tags import TagAnswer
from foundation.labels.transcripts import TranscriptAnswer
from foundation.labels.value import ValueAnswer
from foundation.labels.vector import VectorAnswer

ANSWERS: Mapping[str, Answer] = {
    "class": ClassAnswer(),
    "labels": SetAnswer(),
    "tags": TagAnswer(),
    "transcript": TranscriptAnswer(),
    "span": SpanAnswer(),
    "value": ValueAnswer(),
    "tokens": TokenAnswer(),
    "vector": VectorAnswer(),
}


def answer_of(task: Task) -> Answer:
    """Returns what a model of this task answers with."""
    return ANSWERS[TASKS[task].answer]


def read_labels(array: Array, task: Task) -> Labels:
    """Returns the labels of a task from the array `[n, ...]` of a file."""
    return answer_of(task).read(array, TASKS[task])
