"""The next token at every position of a block, or of a target behind its source: answers `[n, T, 2]`, labels int32 `[n, T]`
(`foundation.core.forms.next_token`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from foundation.answers.answer import Answer, Array, divergences
from foundation.core.forms import next_token


class Tokens(Answer):
    """The token with the largest logit at each position."""

    FROM_HEAD: ClassVar[bool] = False
    LABELS: ClassVar[tuple[str, ...] | None] = ()
    DIFFERS: ClassVar[str] = "nll"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Other tokens; differences of the nll of the true ones."""
        before, after = next_token.choices(reference), next_token.choices(answers)
        predicted = before != next_token.NO_CHOICE
        return (before != after)[predicted], np.abs(answers[..., 0].astype(np.float64) - reference[..., 0])[predicted]

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean of KL(p || p') over the tokens of a row, in nats; logits are `[n, L, V]`."""
        apart = divergences(*(values.reshape(-1, values.shape[-1]) for values in (reference, logits)))
        if not len(reference):
            return apart
        apart = apart.reshape(len(reference), -1)
        counted = None if predicted is None else np.arange(apart.shape[1]) < predicted[:, None]
        return np.asarray(apart.mean(axis=1) if counted is None else apart.mean(axis=1, where=counted))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """The share of tokens predicted differently."""
        return float(np.mean(self.differences(reference, answers)[0]))

    def as_labels(self, labels: Array, answers: Array) -> Array:
        """The predicted tokens, int32 `[n, T]`."""
        chosen = next_token.choices(answers)
        return np.where(labels == next_token.IGNORED, next_token.IGNORED, chosen).astype(np.int32)
