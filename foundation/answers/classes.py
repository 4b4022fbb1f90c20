"""One of the labels of the data: logits `[n, C]`, labels int64 `[n]`."""

from __future__ import annotations

import numpy as np

from foundation.answers.answer import Answer, Array, divergences


class Classes(Answer):
    """The label with the largest logit; of equal ones the first."""

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Other labels; differences of the logits."""
        return answers.argmax(axis=1) != reference.argmax(axis=1), np.abs(answers.astype(np.float64) - reference)

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """KL(p || p') of the probabilities, in nats."""
        return divergences(reference, logits)

    def disagreement(self, reference: Array, answers: Array) -> float:
        """The share of rows with another label."""
        return float(np.mean(reference.argmax(axis=1) != answers.argmax(axis=1)))

    def as_labels(self, labels: Array, answers: Array) -> Array:
        """The predicted labels, int64 `[n]`."""
        return np.asarray(answers.argmax(axis=1))
