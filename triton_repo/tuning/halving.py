"""Successive halving (Jamieson and Talwalkar, AISTATS 2016, algorithm 1), in rounds that keep a third: all points are measured for a short
time, the best third three times as long, and so on until one round is left with at most `FINALISTS`.

The first point, the settings that are already there, is measured in every round. What wins is a proposal: the best of many noisy
measurements is mostly luck, so it is measured anew next to that point (`triton_repo.tuning.confirmation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

KEPT = 3
"""One in so many is promoted to the next round, where it is measured so many times as long."""
FINALISTS = 3


class Rated(Protocol):
    """Result of a measurement."""

    @property
    def rate(self) -> float:
        """The value to maximize."""


P = TypeVar("P")
M = TypeVar("M", bound=Rated)


@dataclass(frozen=True)
class Trial(Generic[P, M]):
    """A point and the last that was measured of it."""

    point: P
    measured: M
    round: int
    """The last round that it was in, from 0."""


def rounds(count: int) -> Iterator[int]:
    """Yields how many of so many points are measured in each round."""
    yield count
    while count > FINALISTS:
        count = max(FINALISTS, math.ceil(count / KEPT))
        yield count


def halve(points: Sequence[P], measure: Callable[[P, float], M], seconds: float) -> list[Trial[P, M]]:
    """Returns every point with its last measurement: later rounds first, and within a round the best first.

    Args:
        points: Distinct points; the first one is never dropped.
        measure: Measures a point for so many seconds.
        seconds: Length of a measurement in the first round.
    """
    trials: dict[P, Trial[P, M]] = {}
    left = list(points)
    for number, count in enumerate(rounds(len(points))):
        left = [left[0], *sorted(left[1:], key=lambda point: -trials[point].measured.rate)[: count - 1]] if number else left
        for point in left:
            trials[point] = Trial(point, measure(point, seconds * KEPT**number), number)
    return sorted(trials.values(), key=lambda trial: (-trial.round, -trial.measured.rate))
