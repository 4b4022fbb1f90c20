"""What sets one kind of answer apart from the others, as far as arrays are concerned.

    class Sounds(Answer): ...        one file in this room, a row in `foundation.answers.table`,
                                     and its losses in `foundation.training.losses`

Other code asks the answer of a task (`foundation.answers.table.answer_of`) and never which kind it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LOGIT_BYTES = 2**26
"""Logits of this size are brought to float64 at once."""


class Answer(ABC):
    """One kind of answer."""

    FROM_HEAD: ClassVar[bool] = True
    """Whether a head on top of the model makes it, which may be new and has one output for each label."""
    PROBABILITIES: ClassVar[bool] = True
    """Whether it is chosen by probabilities, so that label smoothing and divergences of probabilities mean something."""
    LABELS: ClassVar[tuple[str, ...] | None] = None
    """Names of the outputs; None where the data or the model name them."""
    RESPONSE: ClassVar[str] = "label"
    """What a server returns, a name in `foundation.standalone.response.RESPONSES`."""
    DIFFERS: ClassVar[str] = "logit"
    """What `differences` are of, for messages."""
    DISTANCE: ClassVar[str] = "kl"
    """What `distances` are, for reports: kl, mse or squared_distance."""
    DISAGREEMENT: ClassVar[str] = "share of {n} selection rows answered differently"
    """What `disagreement` is, in words, of n rows."""

    @abstractmethod
    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Compares two sets of predictions for the same rows.

        Args:
            reference: Predictions of one backend, float32 `[n, ...]`.
            answers: The answers of another model, of the same shape.

        Returns:
            Which predictions differ, bool `[N]`, and the absolute differences that go with `DIFFERS`, float64 `[...]`.
        """

    @abstractmethod
    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """Returns how far a compressed model is from the original, for each row, float64 `[n]`; 0 where nothing changed.

        Args:
            reference: Logits of the original model, float32 `[n, ...]`.
            logits: Logits of the compressed one, of the same shape.
            predicted: For texts that are generated, the positions of each row that count, from the first on, int `[n]`; None: all.
        """

    @abstractmethod
    def disagreement(self, reference: Array, answers: Array) -> float:
        """Returns how much two sets of predictions disagree where no label may be used, 0 to 1, in the unit of `goals.max_drop`."""

    @abstractmethod
    def as_labels(self, labels: Array, answers: Array) -> Array:
        """Returns labels by which a model agrees most with the one that gave these answers.

        Args:
            labels: The true labels of the rows, of which only the form may be used.
            answers: Predictions of a teacher, float32 `[n, ...]`.
        """

    def unit(self, labels: Array, reference: Array) -> float:
        """Divisor that makes a difference relative; 1 if logits have a unit."""
        return 1.0

    def spread(self, reference: Array) -> float:
        """Divisor that makes a distance relative; 1 if it has a unit."""
        return 1.0


def divergences(reference: Array, logits: Array) -> Array:
    """Returns KL(p || q) of each row, float64 `[n]`, with p and q the softmax of reference and logits `[n, C]`."""
    step = max(1, LOGIT_BYTES // (8 * max(1, reference.shape[1])))  # logits of a block of tokens in float64 would take gigabytes
    parts = [_divergence(reference[start : start + step], logits[start : start + step]) for start in range(0, len(reference), step)]
    return np.concatenate(parts) if parts else np.zeros(0)


def _divergence(reference: Array, logits: Array) -> Array:
    expected, found = _log_softmax(reference), _log_softmax(logits)
    divergence: Array = np.sum(np.exp(expected) * (expected - found), axis=-1)
    return divergence


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalized: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalized
