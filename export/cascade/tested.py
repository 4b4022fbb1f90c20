"""Tests the points of a path on certificate rows, and says what follows: the thresholds, the certificate and the limits of escalation.

The stage does this with predictions that it has just made, `compress verify` again with those that it stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from export.cascade.certificate import betting_p, binomial_p, fixed_sequence, upper_limit
from export.cascade.losses import DROP_RANGE, disagreements, drops
from export.cascade.path import Seen, Thresholds
from foundation.artifacts.cascade import DropBound, Escalation, PathPoint
from foundation.core.arrays import Array
from foundation.labels.form import Labels
from foundation.labels.tasks import Task
from foundation.standalone.confidence import Score, confidence


@dataclass(frozen=True)
class Bounds:
    """The bounds of a certificate."""

    disagreement: float
    """Largest share of rows with another answer."""
    alpha: float
    """One minus the confidence."""
    drop: float | None = None
    """Largest drop of the share of right answers; None: no such bound."""


@dataclass(frozen=True)
class Answers:
    """The answers of the original and of the tiers to some rows."""

    task: Task
    original: Array
    """Predictions in torch, float32 `[n, ...]`."""
    tiers: Sequence[Array]
    """Predictions of each tier in its engine, of the same shape."""
    labels: Labels | None = None
    """Labels of the rows; None where there are none."""
    limit: float | None = None
    """Distance above which a number or a vector is another answer; None for answers that are the same or not."""

    def wrong(self, tier: int) -> Array:
        """Returns which rows a tier answers otherwise than the original, bool `[n]`."""
        return disagreements(self.task, self.original, self.tiers[tier], self.limit)

    def seen(self, scores: Sequence[Score], cost_ms: Sequence[float]) -> Seen:
        """Returns the rows as the path sees them, with other answers as losses.

        Args:
            scores: Score of each tier but the last.
            cost_ms: Time of a row in each tier.
        """
        sure = [confidence(logits, score) for logits, score in zip(self.tiers[:-1], scores, strict=True)]
        return Seen(sure, [self.wrong(tier) for tier in range(len(self.tiers))], cost_ms)


@dataclass(frozen=True)
class Walk:
    """The tests along a path."""

    points: tuple[PathPoint, ...]
    chosen: int | None
    """Number of the point with the least time of those that passed before the first failure, the last of equal ones; None where the first
    one fails."""
    drop: DropBound | None
    """The second bound at the chosen point."""


def certify_path(
    answers: Answers, seen: Seen, points: Sequence[Thresholds], times_ms: Sequence[float], bounds: Bounds, keys: Array
) -> Walk:
    """Tests a path.

    Args:
        answers: The certificate rows.
        seen: Result of `answers.seen`.
        points: The path, fixed on other rows.
        times_ms: Mean time of one of those rows at each point. All points that pass keep the bounds at once, so that any may be chosen.
        bounds: The bounds.
        keys: Content keys of the rows, uint8 `[n, 16]`: their order does not depend on what is answered.
    """
    n, order = len(answers.original), np.lexsort(keys.T[::-1])
    dropping = _dropping(answers, seen) if bounds.drop is not None else None
    found, drawn = list[PathPoint](), list[DropBound | None]()
    for thresholds in points:
        answering = seen.answering(thresholds)
        errors = int(seen.losses_of(answering).sum())
        p_value, drop = binomial_p(errors, n, bounds.disagreement), None
        if dropping is not None and bounds.drop is not None:
            lost = dropping.losses_of(answering)
            other = betting_p(lost[order], bounds.drop, *DROP_RANGE, bounds.alpha)
            drop = DropBound(limit=bounds.drop, drop=float(lost.mean()), p_value=other)
            p_value = max(p_value, other)
        escalated = tuple(int((answering > tier).sum()) for tier in range(len(thresholds)))
        found.append(PathPoint(thresholds=thresholds, disagreements=errors, p_value=p_value, passed=False, escalated=escalated))
        drawn.append(drop)
    last = fixed_sequence([float(point.p_value) for point in found], bounds.alpha)
    passed = -1 if last is None else last
    tested = tuple(point.with_(passed=number <= passed) for number, point in enumerate(found))
    chosen = None if last is None else fastest(times_ms[: last + 1])
    return Walk(tested, chosen, drawn[chosen or 0])


def fastest(times_ms: Sequence[float]) -> int:
    """Returns the number of the least time, the last of equal ones."""
    return min(range(len(times_ms)), key=lambda number: (times_ms[number], -number))


def _dropping(answers: Answers, seen: Seen) -> Seen:
    """Returns the same rows with the drop as loss."""
    assert answers.labels is not None, "the stage needs labels for a bound on the drop"
    lost = [drops(answers.original, tier, answers.labels) for tier in answers.tiers]
    return Seen(seen.scores, lost, seen.cost_ms)


def escalations(tested: Walk, n: int, alpha: float) -> tuple[Escalation, ...]:
    """Returns how many rows go beyond each tier but the last at the chosen point.

    The limits hold for all points of the path and all tiers at once, by a share of alpha for each: so they hold for the chosen point too.

    Args:
        tested: The tested path, of which a point was chosen.
        n: Certificate rows.
        alpha: One minus the confidence.
    """
    assert tested.chosen is not None, "a point was chosen"
    counts = tested.points[tested.chosen].escalated
    share = alpha / (len(tested.points) * len(counts))
    return tuple(
        Escalation(tier=number, units=units, n=n, rate=units / n, upper=upper_limit(units, n, share), confidence=1 - alpha)
        for number, units in enumerate(counts, 1)
    )
