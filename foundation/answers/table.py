"""The table of answers."""

from __future__ import annotations

from collections.abc import Mapping

from foundation.answers.answer import Answer
from foundation.answers.classes import Classes
from foundation.answers.sets import Sets
from foundation.answers.spans import Spans
from foundation.answers.tags import Tags
from foundation.answers.tokens import Tokens
from foundation.answers.transcripts import Transcripts
from foundation.answers.value import Value
from foundation.answers.vector import Vector
from foundation.core.tasks import TASKS, Task

ANSWERS: Mapping[str, Answer] = {
    "class": Classes(),
    "labels": Sets(),
    "tags": Tags(),
    "transcript": Transcripts(),
    "span": Spans(),
    "value": Value(),
    "tokens": Tokens(),
    "vector": Vector(),
}


def answer_of(task: Task) -> Answer:
    """Returns the form of this task's answers."""
    return ANSWERS[TASKS[task].answer]
