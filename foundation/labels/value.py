"""A number: logits `[n, 1]`, labels float32 `[n]`; of candidates that are put in order `[n, 13]` (`foundation.labels.candidates`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foundation.core.arrays import Array
from foundation.core.correlation import pearson
from foundation.labels.answer import Answer
from foundation.labels.form import Labels

SCORE: tuple[str, ...] = ("score",)
"""The one "label" of a number."""


@dataclass(frozen=True, eq=False)
class Numbers(Labels):
    """Numbers, float32 `[n]`."""

    def pseudo_labels(self, answers: Array) -> Numbers:
        """The predicted numbers."""
        return Numbers(answers[:, 0])

    def unit(self, reference: Array) -> float:
        """The standard deviation of the labels."""
        return float(np.std(self.array.astype(np.float64))) or 1.0


class ValueAnswer(Answer):
    """The number itself."""

    FORM: ClassVar[type[Labels]] = Numbers
    PROBABILITIES: ClassVar[bool] = False
    LABELS: ClassVar[tuple[str, ...] | None] = SCORE
    DISTANCE: ClassVar[str] = "mse"
    DISAGREEMENT: ClassVar[str] = "1 - Pearson to the float answers on {n} selection rows"
    CONFIDENCE: ClassVar[str | None] = "value"
    FAR: ClassVar[str | None] = "the absolute difference of the numbers"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """No number counts as another answer; differences of the numbers."""
        return np.zeros(len(reference), bool), np.abs(answers.astype(np.float64) - reference)

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The squared difference."""
        squares: Array = (reference.astype(np.float64) - logits) ** 2
        return np.asarray(squares.reshape(len(squares), -1).mean(axis=1))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """1 - Pearson of the two."""
        return 1.0 - pearson(reference[:, 0], answers[:, 0])

    def apart(self, reference: Array, answers: Array) -> Array:
        """The absolute difference."""
        return np.asarray(np.abs(answers.astype(np.float64) - reference).reshape(len(reference), -1).max(axis=1))

    def normalizer(self, reference: Array) -> float:
        """The variance of the reference."""
        return float(np.var(reference.astype(np.float64)))
