"""What sets the tasks apart: one row of facts for each, so that the rest asks for a fact and not for a name.

    class    one of the labels of the data; logits [n, C], labels int64 [n]
    value    a number; logits [n, 1], labels float32 [n]
    tokens   the next token at every position of a block; answers [n, T, 2] and labels int32 [n, T] (`compress.core.next_token`)

What is computed by these facts stays where it belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

Task = Literal["text-classification", "text-regression", "text-generation", "image-classification"]
SCORE: tuple[str, ...] = ("score",)


@dataclass(frozen=True)
class Facts:
    """What has to be known of a task."""

    modality: Literal["text", "image"]
    """What its rows are made of."""
    answer: Literal["class", "value", "tokens"]
    """What a model answers to a row."""
    metric: str
    """The metric that goals and the report are about."""
    auto_class: str
    """The class of Transformers that picks the model class."""
    higher_is_better: bool = True
    """Whether more of the metric is better."""
    relative: bool = False
    """Whether a drop of the metric is a fraction of its value before, not a difference."""


TASKS: Mapping[Task, Facts] = {
    "text-classification": Facts("text", "class", "accuracy", "AutoModelForSequenceClassification"),
    "text-regression": Facts("text", "value", "pearson", "AutoModelForSequenceClassification"),
    "text-generation": Facts("text", "tokens", "perplexity", "AutoModelForCausalLM", higher_is_better=False, relative=True),
    "image-classification": Facts("image", "class", "accuracy", "AutoModelForImageClassification"),
}


def facts(task: str) -> Facts:
    """Returns the facts of a task by its name."""
    return TASKS[cast("Task", task)]


def num_classes(task: Task, labels: Sequence[str]) -> int | None:
    """Returns the number of classes, by the names of the labels of the data; None for a task that has none."""
    return len(labels) if TASKS[task].answer == "class" else None


def drop(task: Task, before: float, after: float) -> float:
    """Returns what was lost of the primary metric: before - after, of a lower-is-better one its relative increase after / before - 1."""
    return after / before - 1 if TASKS[task].relative else before - after
