"""A span of a context for each question: what is kept of the logits `[L, 2]` of its windows, and labels int32 `[n, 1 + G, W, 2]`
(`foundation.core.forms.spans`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from foundation.answers.answer import Answer, Array
from foundation.core.forms import spans
from foundation.standalone.response import LONGEST
from foundation.standalone.tolerance import MEDIAN_LIMIT

NEAR_TIE = 3 * 2 * MEDIAN_LIMIT / 0.6745
"""How far two spans may be apart, in standard deviations of the logits, for an engine that rounds elsewhere to choose the other one: three
standard deviations of the difference of two sums of two logits, each of which is off by `MEDIAN_LIMIT` in the median."""
LEAST_SHARE = 1e-6
"""Probability that all other tokens have at least: below it float32 has no digits left."""


class Spans(Answer):
    """The best span of a window, or none."""

    LABELS: ClassVar[tuple[str, ...] | None] = ("start", "end")
    RESPONSE: ClassVar[str] = "span"
    DISAGREEMENT: ClassVar[str] = "1 - F1 against the answers of the float model on {n} windows of selection"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Windows with another answer; differences of the logits of the first token and of those that are kept of both.

        There are hundreds of spans in a window, and many lie close together: another one counts where it is more than `NEAR_TIE` worse to
        the reference.
        """
        ours, theirs = spans.sides_of(reference), spans.sides_of(answers)
        same = _same(ours, theirs)
        apart = np.abs(theirs.logits[:, :, None].astype(np.float64) - ours.logits[..., None])[same]
        first = np.abs(theirs.first.astype(np.float64) - ours.first).reshape(-1)
        changed = (spans.choices(reference) != spans.choices(answers)).any(axis=1)
        changed &= ~self._tied(reference, answers, changed)
        return changed, np.concatenate([first, apart])

    def unit(self, labels: Array, reference: Array) -> float:
        """The standard deviation of the kept logits of the reference: logits of two heads differ by orders of magnitude."""
        return _deviation(reference)

    def _tied(self, reference: Array, answers: Array, changed: Array) -> Array:
        """Returns in which of the changed windows the other span is almost as good to the reference, bool `[n]`."""
        limit, tied = NEAR_TIE * _deviation(reference), np.zeros(len(reference), bool)
        for row in np.flatnonzero(changed & ~_none(reference) & ~_none(answers)):
            known, other = (spans.sides_of(of[row : row + 1]) for of in (reference, answers))
            start, end = _best(other)
            here = [known.logits[0, side][known.places[0, side] == place] for side, place in enumerate((start, end))]
            if all(len(found) for found in here):
                tied[row] = float(reference[row, spans.Part.SCORE]) - sum(float(found[0]) for found in here) <= limit
        return tied

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean over start and end of KL(p || p'), in nats, where tokens that are not kept of both count as one: never more than the
        divergence of all tokens."""
        ours, theirs = spans.sides_of(reference), spans.sides_of(logits)
        same = _same(ours, theirs)
        log_p, log_q = ours.logits.astype(np.float64) - ours.total[..., None], theirs.logits.astype(np.float64) - theirs.total[..., None]
        first_p, first_q = (np.asarray(of.first, np.float64) - of.total for of in (ours, theirs))
        shared_p, shared_q = same.any(axis=3), same.any(axis=2)
        matched = np.where(same, log_q[:, :, None], 0.0).sum(axis=3)  # of each place of the reference, where both keep it
        apart = np.where(shared_p, np.exp(log_p) * (log_p - matched), 0.0).sum(axis=2) + np.exp(first_p) * (first_p - first_q)
        rest_p = _rest(np.exp(first_p) + np.where(shared_p, np.exp(log_p), 0.0).sum(axis=2))
        rest_q = _rest(np.exp(first_q) + np.where(shared_q, np.exp(log_q), 0.0).sum(axis=2))
        return np.asarray(np.maximum(apart + rest_p * np.log(rest_p / rest_q), 0.0).mean(axis=1))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """1 - the mean F1 of the words of both answers to each window."""
        pairs = [
            [() if none else spans.predicted_words(row) for none, row in zip(_none(of), of, strict=True)] for of in (reference, answers)
        ]
        return 1.0 - float(np.mean([spans.f1_of(*pair) for pair in zip(*pairs, strict=True)]))

    def as_labels(self, labels: Array, answers: Array) -> Array:
        """The answers of the model as the true ones."""
        return spans.with_answers(labels, answers)


def _deviation(reference: Array) -> float:
    sides = spans.sides_of(reference)
    return max(float(np.std(sides.logits[sides.places != spans.NO_PLACE].astype(np.float64))), 1e-12)


def _best(sides: spans.Sides) -> tuple[float, float]:
    """Returns the first and the last token of the best span among the kept ones of a window."""
    starts, ends = sides.places[0]
    sums = sides.logits[0, 0][:, None].astype(np.float64) + sides.logits[0, 1]
    lengths = ends - starts[:, None]
    allowed = (starts[:, None] != spans.NO_PLACE) & (ends != spans.NO_PLACE) & (lengths >= 0) & (lengths < LONGEST)
    first, last = np.unravel_index(np.argmax(np.where(allowed, sums, -np.inf)), sums.shape)
    return float(starts[first]), float(ends[last])


def _same(ours: spans.Sides, theirs: spans.Sides) -> Array:
    """Returns which kept tokens are the same, bool `[n, 2, k, k]`."""
    return np.asarray((ours.places[..., None] == theirs.places[:, :, None]) & (ours.places[..., None] != spans.NO_PLACE))


def _rest(taken: Array) -> Array:
    return np.maximum(1.0 - taken, LEAST_SHARE)


def _none(answers: Array) -> Array:
    return np.asarray(spans.choices(answers)[:, 0] == spans.NO_PLACE)
