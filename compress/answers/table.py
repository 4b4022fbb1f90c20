"""The table of answers."""

from __future__ import annotations

from collections.abc import Mapping

from compress.answers.answer import Answer
from compress.answers.classes import Classes
from compress.answers.sets import Sets
from compress.answers.spans import Spans
from compress.answers.tags import Tags
from compress.answers.tokens import Tokens
from compress.answers.transcripts import Transcripts
from compress.answers.value import Value
from compress.answers.vector import Vector
from compress.core.tasks import TASKS, Task

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
    """Returns what a model of this task answers with."""
    return ANSWERS[TASKS[task].answer]
