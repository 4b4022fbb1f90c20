"""A span of a context for each question: what is kept of the logits `[L, 2]` of its windows, and labels int32 `[n, 1 + G, W, 2]`
(`compress.core.spans`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from compress.answers.answer import Answer, Array
from compress.core import spans

LEAST_SHARE = 1e-6
"""Probability that all other tokens have at least: below it float32 does not tell."""


class Spans(Answer):
    """The best span of a window, or none."""

    LABELS: ClassVar[tuple[str, ...] | None] = ("start", "end")
    RESPONSE: ClassVar[str] = "span"
    DISAGREEMENT: ClassVar[str] = "1 - F1 against the answers of the float model on {n} windows of selection"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Windows with another answer; differences of the logits of the first token and of those that are kept of both."""
        ours, theirs = spans.sides_of(reference), spans.sides_of(answers)
        same = _same(ours, theirs)
        apart = np.abs(theirs.logits[:, :, None].astype(np.float64) - ours.logits[..., None])[same]
        first = np.abs(theirs.first.astype(np.float64) - ours.first).reshape(-1)
        return (spans.choices(reference) != spans.choices(answers)).any(axis=1), np.concatenate([first, apart])

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean over start and end of KL(p || p'), in nats, where tokens that are not kept of both count as one: never more than that of
        all tokens."""
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


def _same(ours: spans.Sides, theirs: spans.Sides) -> Array:
    """Returns which kept tokens are the same, bool `[n, 2, k, k]`."""
    return np.asarray((ours.places[..., None] == theirs.places[:, :, None]) & (ours.places[..., None] != spans.NO_PLACE))


def _rest(taken: Array) -> Array:
    return np.maximum(1.0 - taken, LEAST_SHARE)


def _none(answers: Array) -> Array:
    return np.asarray(spans.choices(answers)[:, 0] == spans.NO_PLACE)
