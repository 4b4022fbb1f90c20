"""The properties of each kind of answer, as far as arrays are concerned.

    class GradeAnswer(Answer): ...   in the file of its labels (`foundation.labels.form`), with losses in `foundation.training.losses`

Other code asks the answer of a task (`foundation.labels.facts.Facts.answer`) and never which kind it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.form import Figure, Labels
from foundation.standalone.preprocess import Preprocessor

LOGIT_BYTES = 2**26
"""Logits of this size are brought to float64 at once."""


class Answer(ABC):
    """One kind of answer."""

    FORM: ClassVar[type[Labels]]
    """The form of its labels, where the task names no other."""
    FIGURES: ClassVar[Mapping[str, Figure]] = {}
    """Metrics that are computed in another way than for other answers, by name."""
    FROM_HEAD: ClassVar[bool] = True
    """Whether a head on top of the model makes it, which may be new and has one output for each label."""
    PROBABILITIES: ClassVar[bool] = True
    """Whether it is chosen by probabilities, so that label smoothing and divergences of probabilities mean something."""
    PER_TOKEN: ClassVar[bool] = False
    """Whether there are logits for every token of a row, or every frame of a sound."""
    JUDGES_CLASSES: ClassVar[bool] = False
    """Whether every class has a recall and a precision over rows."""
    POOLS_WINDOWS: ClassVar[bool] = False
    """Whether the logits of the windows of a long text can become one answer."""
    LABELS: ClassVar[tuple[str, ...] | None] = None
    """Names of the outputs; None where the data or the model name them."""
    RESPONSE: ClassVar[str] = "label"
    """What a server returns, a name in `foundation.standalone.response.RESPONSES`."""
    NOT_ON_GPUS: ClassVar[str | None] = None
    """What a server answers with, where the repository of TensorRT cannot: tags, spans or vectors; None where it can."""
    DIFFERS: ClassVar[str] = "logit"
    """Name of the values behind `differences`, for messages."""
    DISTANCE: ClassVar[str] = "kl"
    """Kind of `distances`, for reports: kl, mse or squared_distance."""
    DISAGREEMENT: ClassVar[str] = "share of {n} selection rows answered differently"
    """Describes `disagreement` in words, for n rows."""
    CONFIDENCE: ClassVar[str | None] = None
    """Form of the scores that say how sure an answer is (`foundation.standalone.confidence`); None where there are none."""
    FAR: ClassVar[str | None] = None
    """What `apart` measures, for messages; None where answers are the same or not."""

    def __init__(self, form: type[Labels] | None = None) -> None:
        """Makes the answer of a task.

        Args:
            form: The form of its labels; None: `FORM`.
        """
        self.form = self.FORM if form is None else form

    @property
    def classifies(self) -> bool:
        """Whether there is an output for each label, whose names the data or the model know; of transcripts these are characters."""
        return self.LABELS is None

    def compressed(self, preprocessor: Preprocessor, rows: Sequence[Any], logits: Array) -> Array:
        """Returns the part of the logits of a batch that predictions hold, float32 `[b, ...]`; by default all.

        Args:
            preprocessor: Prepares the rows.
            rows: The rows of the batch.
            logits: float32 `[b, ...]`.
        """
        return logits

    def numbers(self, outputs: int, positions: int) -> int:
        """Returns how many numbers a prediction holds.

        Args:
            outputs: Outputs of the model: labels, or the width of a vector.
            positions: Tokens, or frames, of the longest row.
        """
        return outputs

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

    def other_rows(self, reference: Array, answers: Array) -> Array:
        """Returns which rows have another answer, bool `[n]`: the answer to the whole row, where it has several parts."""
        raise NotImplementedError(f"{type(self).__name__} has no scores that a cascade could go by")

    def apart(self, reference: Array, answers: Array) -> Array:
        """Returns how far each answer is from that of the reference, float64 `[n]`, as `FAR` says."""
        raise NotImplementedError(f"{type(self).__name__} has answers that are the same or not")

    def has_class(self, answers: Array, true: Array, number: int) -> tuple[Array, Array]:
        """Returns which values are predicted as a class and which have it, bool `[m]`, of what `Labels.values` returned."""
        raise NotImplementedError(f"{type(self).__name__} has no classes")

    def read(self, array: Array) -> Labels:
        """Returns labels from the array of a file, `[n, ...]`, as `Labels.array` was written."""
        return self.form(array)

    def normalizer(self, reference: Array) -> float:
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
