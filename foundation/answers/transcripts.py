"""The text that is spoken: what is kept of the logits `[F, V]` of frames, and labels int32 `[n, 2, 1 + T]`
(`foundation.core.forms.transcripts`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from foundation.answers.answer import Answer, Array
from foundation.core.forms.transcripts import ABSENT, NO_TOKEN, Part, errors, rate, texts_of, with_answers
from foundation.standalone.tolerance import MEDIAN_LIMIT

NEAR_TIE = 3 * 2**0.5 * MEDIAN_LIMIT / 0.6745
"""How far two tokens of a frame may be apart, in standard deviations of the logits, for an engine that rounds elsewhere to choose the other
one: three standard deviations of the difference of two logits, each of which is off by `MEDIAN_LIMIT` in the median."""
LEAST_SHARE = 1e-6
"""Probability that all other tokens have at least: below it float32 has no digits left."""


class Transcripts(Answer):
    """The text that is read greedily."""

    RESPONSE: ClassVar[str] = "transcript"
    DISAGREEMENT: ClassVar[str] = "word error rate against the texts of the float model on {n} selection rows"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Sounds with another text; differences of the logits that are kept of both.

        There are hundreds of frames in a sound: another text counts where, at a frame with another token, that token is more than
        `NEAR_TIE` worse to the reference.
        """
        changed = np.array([one != other for one, other in zip(texts_of(reference), texts_of(answers), strict=True)], bool)
        changed &= ~self._tied(reference, answers)
        same = _same(reference, answers)
        apart = np.abs(answers[..., None, Part.LOGITS].astype(np.float64) - reference[..., Part.LOGITS, None])
        return changed, apart[same]

    def unit(self, labels: Array, reference: Array) -> float:
        """The standard deviation of the kept logits of the reference: logits of two heads differ by orders of magnitude."""
        return _deviation(reference)

    def _tied(self, reference: Array, answers: Array) -> Array:
        """Returns of which sounds all other tokens are almost as good to the reference, bool `[n]`."""
        theirs = answers[..., Part.IDS.start, None]
        logits = reference[..., Part.LOGITS].astype(np.float64)
        other = np.where(reference[..., Part.IDS] == theirs, logits, -np.inf).max(axis=-1)  # not kept: too far
        limit = NEAR_TIE * _deviation(reference)
        return np.asarray((~_real(reference) | (logits[..., 0] - other <= limit)).all(axis=1))

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean over the frames of KL(p || p'), in nats, where tokens that are not kept of both count as one: never more than the
        divergence of all tokens."""
        same, real = _same(reference, logits), _real(reference)
        log_p, log_q = (of[..., Part.LOGITS].astype(np.float64) - of[..., Part.TOTAL, None] for of in (reference, logits))
        shared_p, shared_q = same.any(axis=3), same.any(axis=2)
        matched = np.where(same, log_q[:, :, None], 0.0).sum(axis=3)  # of each token of the reference, where both keep it
        apart = np.where(shared_p, np.exp(log_p) * (log_p - matched), 0.0).sum(axis=2)
        rest_p, rest_q = (
            np.maximum(1.0 - np.where(shared, np.exp(log), 0.0).sum(axis=2), LEAST_SHARE)
            for shared, log in ((shared_p, log_p), (shared_q, log_q))
        )
        whole = np.maximum(apart + rest_p * np.log(rest_p / rest_q), 0.0)
        return np.asarray(np.where(real, whole, 0.0).sum(axis=1) / np.maximum(real.sum(axis=1), 1))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """The word error rate of one set of texts against the other, at most 1."""
        return min(1.0, rate(errors(texts_of(reference), texts_of(answers)), 0))

    def as_labels(self, labels: Array, answers: Array) -> Array:
        """The texts of the model as the true ones."""
        return with_answers(labels, answers)


def _real(answers: Array) -> Array:
    return np.asarray(answers[..., Part.CHARACTER] != ABSENT)


def _deviation(reference: Array) -> float:
    kept = reference[..., Part.LOGITS][reference[..., Part.IDS] != NO_TOKEN]
    return max(float(np.std(kept.astype(np.float64)) if len(kept) else 0.0), 1e-12)


def _same(ours: Array, theirs: Array) -> Array:
    """Returns which kept tokens are the same, bool `[n, F, K, K]`, the first K from `ours`."""
    return np.asarray((ours[..., Part.IDS, None] == theirs[..., None, Part.IDS]) & (ours[..., Part.IDS, None] != NO_TOKEN))
