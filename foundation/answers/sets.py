"""Any number of the labels of the data: logits `[n, C]`, labels bool `[n, C]`. A label holds where its logit is above 0."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from foundation.answers.answer import Answer, Array, divergences
from foundation.core.forms.label_sets import micro_f1


class Sets(Answer):
    """The set of labels whose logits are above 0."""

    RESPONSE: ClassVar[str] = "labels"
    DISAGREEMENT: ClassVar[str] = "1 - micro F1 against the labels that the float model finds on {n} selection rows"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Rows with another set of labels; differences of the logits."""
        return ((answers > 0) != (reference > 0)).any(axis=1), np.abs(answers.astype(np.float64) - reference)

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean over the labels of KL(p || p') of the probabilities that each holds, in nats."""
        both = (np.stack([np.zeros_like(values), values], axis=-1).reshape(-1, 2) for values in (reference, logits))
        return np.asarray(divergences(*both).reshape(reference.shape).mean(axis=1))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """1 - micro F1 of one set of labels against the other."""
        return 1.0 - micro_f1(answers > 0, reference > 0)

    def as_labels(self, labels: Array, answers: Array) -> Array:
        """The labels found, bool `[n, C]`."""
        return np.asarray(answers > 0)
