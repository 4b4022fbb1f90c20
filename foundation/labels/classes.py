"""One of the labels of the data: logits `[n, C]`, labels int64 `[n]`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.answer import Answer, divergences
from foundation.labels.form import MOST_CLASSES, Labels, counts_of_ids


@dataclass(frozen=True, eq=False)
class ClassIds(Labels):
    """Class ids, int64 `[n]`."""

    DTYPE: ClassVar[type] = np.int64
    ONE_CLASS: ClassVar[bool] = True

    def pseudo_labels(self, answers: Array) -> ClassIds:
        """The predicted classes."""
        return ClassIds(np.asarray(answers.argmax(axis=1)))

    def choices(self, answers: Array) -> tuple[Array, Array] | None:
        """The label with the largest logit, and the true one."""
        return answers.argmax(axis=1), self.array

    def class_counts(self, answers: Array) -> Array | None:
        """Counts of each class."""
        return counts_of_ids(answers.argmax(axis=1), self.array, answers.shape[1])

    def constants(self, answers: Array) -> Iterator[Array]:
        """Each of the five most frequent classes."""
        for known in np.argsort(-np.bincount(self.array), kind="stable")[:MOST_CLASSES]:
            yield np.tile(np.arange(answers.shape[1]) == known, (len(self), 1)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class UnknownClassIds(ClassIds):
    """Rows of classes without labels: zeros, int64 `[n]`, which no loss may read."""

    KNOWN: ClassVar[bool] = False


class ClassAnswer(Answer):
    """The label with the largest logit; of equal ones the first."""

    FORM: ClassVar[type[Labels]] = ClassIds
    JUDGES_CLASSES: ClassVar[bool] = True
    POOLS_WINDOWS: ClassVar[bool] = True
    CONFIDENCE: ClassVar[str | None] = "class"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Other labels; differences of the logits."""
        return answers.argmax(axis=1) != reference.argmax(axis=1), np.abs(answers.astype(np.float64) - reference)

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """KL(p || p') of the probabilities, in nats."""
        return divergences(reference, logits)

    def disagreement(self, reference: Array, answers: Array) -> float:
        """The share of rows with another label."""
        return float(np.mean(self.other_rows(reference, answers)))

    def other_rows(self, reference: Array, answers: Array) -> Array:
        """Rows with another label."""
        return np.asarray(reference.argmax(axis=1) != answers.argmax(axis=1))

    def has_class(self, answers: Array, true: Array, number: int) -> tuple[Array, Array]:
        """Rows whose largest logit is of the class, and rows of the class."""
        return answers.argmax(axis=1) == number, true == number
