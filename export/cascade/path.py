"""The path of a cascade: thresholds from the most careful ones to those that keep every row, in the order in which they are tested.

The path is fixed on selection rows, before a certificate row is looked at. With T tiers a point has T - 1 thresholds; the first point keeps
no row, so that the last tier answers all of them, and no threshold rises along the path. Levels of a threshold are the middles between
scores of selection rows, and as many values evenly spaced between the least and the largest score: rows of the traffic are often less
sure than selection rows are.

With two thresholds a path through all pairs is needed. From every point one of the two thresholds goes on to the level with the best

    (time saved for a row on average) / (rows that are answered otherwise + 1/4)

on selection rows, as if every tier were asked: a tier that kept no row so far would else never start. Between two such points it takes
every level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foundation.core.arrays import Array
from foundation.standalone.confidence import KEEP_ALL, route

Thresholds = tuple[float | None, ...]
"""One for each tier but the last; None: the tier keeps no row."""
MOST_LEVELS = 256
"""Levels of a threshold from scores, and as many evenly spaced ones."""
STEPS, REACH = 32, 6
"""With two thresholds: coarse steps of each, and the steps that one move may take."""
PRIOR = 0.25


@dataclass(frozen=True)
class Seen:
    """What is known of the tiers on some rows."""

    scores: Sequence[Array]
    """Scores of each tier but the last, float64 `[n]` each."""
    wrong: Sequence[Array]
    """Losses of each tier: rows that it answers otherwise than the original, bool or float64 `[n]` each."""
    cost_ms: Sequence[float]
    """Time of a row in each tier."""

    def losses(self, thresholds: Thresholds) -> Array:
        """Returns the loss of each row in the cascade, float64 `[n]`."""
        return self.losses_of(self.answering(thresholds))

    def losses_of(self, answering: Array) -> Array:
        """Returns the loss of each row, float64 `[n]`.

        Args:
            answering: Result of `answering`.
        """
        return np.choose(answering, [np.asarray(loss, np.float64) for loss in self.wrong])

    def answering(self, thresholds: Thresholds) -> Array:
        """Returns the number of the tier that answers each row, from 0, int64 `[n]`."""
        return route(self.scores, thresholds)

    def time_ms(self, thresholds: Thresholds, *, asks_all: bool = False) -> float:
        """Returns the mean time of a row.

        Args:
            thresholds: The thresholds.
            asks_all: Whether a tier that keeps no row is asked too.
        """
        answering = self.answering(thresholds)
        asks = [asks_all or threshold is not None for threshold in thresholds]
        costs = [cost if asked else 0.0 for cost, asked in zip(self.cost_ms, (*asks, True), strict=True)]
        return float(np.cumsum(costs)[answering].mean())


def levels(scores: Array, most: int = MOST_LEVELS) -> list[float | None]:
    """Returns the levels of a threshold, from the most careful one, None, to `KEEP_ALL`.

    Args:
        scores: Scores of selection rows, float64 `[n]`; NaN where a row has none.
        most: Levels from scores, and as many evenly spaced ones, at most.
    """
    known = np.unique(scores[np.isfinite(scores)])
    middles = (known[:-1] + known[1:]) / 2
    chosen = middles[np.unique(np.linspace(0, len(middles) - 1, min(most, len(middles))).round().astype(int))] if len(middles) else middles
    even = np.linspace(known[0], known[-1], most) if len(known) > 1 else known
    found = np.unique(np.concatenate([chosen, even]))
    return [None, *(float(level) for level in found[::-1]), KEEP_ALL]


def fastest_path(seen: Seen, allowed: float) -> list[Thresholds]:
    """Returns the path to test: through all tiers, or past the first or the second of three, which then keeps no row.

    A tier that takes its time and keeps few rows is better left out. The path is the one with the least time at a share of other answers
    that can pass (`fastest_within`), on the rows of `seen`; through all tiers where that is no slower.

    Args:
        seen: Selection rows.
        allowed: The share of rows with other answers that the certificate can pass.
    """
    paths = [path(seen)]
    if len(seen.scores) > 1:
        for tier, scores in enumerate(seen.scores):
            paths.append([tuple(level if one == tier else None for one in range(len(seen.scores))) for level in levels(scores)])
    return min(paths, key=lambda points: fastest_within(seen, points, allowed))


def fastest_within(seen: Seen, points: Sequence[Thresholds], allowed: float) -> float:
    """Returns the least time of the points before the share of rows with other answers is above what is allowed; of the first point, if it
    is there.

    Args:
        seen: Selection rows.
        points: A path.
        allowed: The share.
    """
    times = [seen.time_ms(points[0])]
    for point in points[1:]:
        if seen.losses(point).mean() > allowed:
            break
        times.append(seen.time_ms(point))
    return min(times)


def path(seen: Seen) -> list[Thresholds]:
    """Returns the points of the path through all of two or three tiers, fixed on the rows of `seen`."""
    fine = [levels(scores) for scores in seen.scores]
    if len(fine) == 1:
        return [(level,) for level in fine[0]]
    coarse = [_spread(one) for one in fine]
    places = [0 for _ in fine]
    points: list[Thresholds] = [tuple(one[0] for one in fine)]
    while any(place < len(one) - 1 for place, one in zip(places, coarse, strict=True)):
        tier, place = max(_moves(places, coarse), key=lambda move: _worth(seen, fine, coarse, places, move))
        old, new = coarse[tier][places[tier]], coarse[tier][place]
        points += [(*points[-1][:tier], fine[tier][level], *points[-1][tier + 1 :]) for level in range(old + 1, new + 1)]
        places[tier] = place
    return points


def _spread(fine: Sequence[float | None]) -> list[int]:
    """Returns the numbers of some levels, evenly spread, with the first and the last one."""
    return sorted({int(number) for number in np.linspace(0, len(fine) - 1, min(STEPS, len(fine))).round()})


def _moves(places: Sequence[int], coarse: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yields (tier, place) of every move: one threshold goes to a later coarse level."""
    for tier, (place, known) in enumerate(zip(places, coarse, strict=True)):
        for new in range(place + 1, min(place + REACH, len(known) - 1) + 1):
            yield tier, new


def _worth(
    seen: Seen, fine: Sequence[Sequence[float | None]], coarse: Sequence[Sequence[int]], places: Sequence[int], move: tuple[int, int]
) -> float:
    """Returns the time that a move saves, for each row that it lets be answered otherwise."""
    before, after = list(places), list(places)
    after[move[0]] = move[1]
    old, new = (tuple(one[known[place]] for one, known, place in zip(fine, coarse, where, strict=True)) for where in (before, after))
    saved = seen.time_ms(old, asks_all=True) - seen.time_ms(new, asks_all=True)
    harm = max(0.0, float(seen.losses(new).sum() - seen.losses(old).sum()))
    return saved / (harm + PRIOR)
