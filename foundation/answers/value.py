"""A number: logits `[n, 1]`, labels float32 `[n]`; of candidates that are put in order `[n, 13]` (`foundation.core.forms.candidates`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from foundation.answers.answer import Answer, Array
from foundation.core.correlation import pearson
from foundation.core.forms import candidates
from foundation.core.forms.table import form_of
from foundation.core.tasks import SCORE


class Value(Answer):
    """The number itself."""

    PROBABILITIES: ClassVar[bool] = False
    LABELS: ClassVar[tuple[str, ...] | None] = SCORE
    DISTANCE: ClassVar[str] = "mse"
    DISAGREEMENT: ClassVar[str] = "1 - Pearson to the float answers on {n} selection rows"

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

    def as_labels(self, labels: Array, answers: Array) -> Array:
        """The numbers, float32 `[n]`; of candidates, grades by their places."""
        taught = form_of(labels).taught
        return answers[:, 0] if taught is None else taught(labels, answers)

    def unit(self, labels: Array, reference: Array) -> float:
        """The standard deviation of the labels; where only the order of candidates counts, the standard deviation of the reference."""
        of = reference if candidates.are_candidates(labels) else labels
        return float(np.std(of.astype(np.float64))) or 1.0

    def spread(self, reference: Array) -> float:
        """The variance of the reference."""
        return float(np.var(reference.astype(np.float64)))
