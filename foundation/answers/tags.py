"""A tag for each word: logits `[n, L, C]` of the first token of each, labels int32 `[n, C + W, 2]` (`foundation.core.forms.tags`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from foundation.answers.answer import Answer, Array, divergences
from foundation.core.forms import tags


class Tags(Answer):
    """The tag with the largest logit, of each word."""

    RESPONSE: ClassVar[str] = "entities"
    DISAGREEMENT: ClassVar[str] = "share of the words of {n} selection rows with another tag"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Words with another tag; differences of their logits."""
        words = tags.are_words(reference) | tags.are_words(answers)
        return (tags.choices(reference) != tags.choices(answers))[words], np.abs(answers.astype(np.float64) - reference)[words]

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean over the words of a row of KL(p || p') of the probabilities, in nats."""
        words = tags.are_words(reference)
        apart = np.zeros(words.shape)
        apart[words] = divergences(reference[words], logits[words])
        return np.asarray(apart.sum(axis=1) / np.maximum(words.sum(axis=1), 1))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """The share of words with another tag."""
        changed = self.differences(reference, answers)[0]
        return float(np.mean(changed)) if len(changed) else 0.0

    def as_labels(self, labels: Array, answers: Array) -> Array:
        """The predicted tags of the same words."""
        return tags.with_choices(labels, answers)
