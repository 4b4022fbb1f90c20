"""The time of a row at the live mix: rows of the lengths of the evaluation rows, one at a time, in engines that do nothing else.

The time of an engine at a length is the latency that the run measured at the smallest batch, over its rows; between two measured lengths it
is interpolated, and beyond the longest it grows with the length. A row takes the sum of the times of the tiers that it goes through.
Percentiles are those of 20,000 draws: of the rows, and for each tier of a row of the measured distribution of its latency.

Left out: waiting for other requests, batches, and what a server adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foundation.artifacts.cascade import LiveMix, Times
from foundation.artifacts.timed import VariantTiming
from foundation.core.arrays import Array

DRAWS = 20_000


@dataclass(frozen=True)
class Clock:
    """The times of one engine."""

    rows: Mapping[int, VariantTiming]
    """Its latency at the smallest batch, by length; 0 for rows of one size."""

    @classmethod
    def of(cls, rows: Sequence[VariantTiming]) -> Clock | None:
        """Returns the clock of an engine from its latency rows; None where it was not timed to the end."""
        timed = [row for row in rows if row.p50_ms is not None]
        smallest = min((row.batch or 1 for row in timed), default=0)
        found = {row.sequence or 0: row for row in timed if (row.batch or 1) == smallest}
        return cls(dict(sorted(found.items()))) if found else None

    @property
    def batch(self) -> int:
        """Rows of a call that was timed."""
        return next(iter(self.rows.values())).batch or 1

    def median_ms(self, length: int) -> float:
        """Returns the median time of a row of a length."""
        lengths = list(self.rows)
        medians = [row.median_ms / self.batch for row in self.rows.values()]
        return float(np.interp(length, lengths, medians)) * max(1.0, length / lengths[-1] if lengths[-1] else 1.0)

    def draw_ms(self, length: int, at: Array) -> Array:
        """Returns times of a row of a length, float64 `[n]`.

        Args:
            length: The length.
            at: Levels of the distribution of its time, 0 to 1, float64 `[n]`.
        """
        nearest = self.rows[min(self.rows, key=lambda known: abs(known - length))]
        quantiles = [float(value) for value in nearest.quantiles_ms if value is not None]
        spread = np.interp(at, np.linspace(0, 1, len(quantiles)), quantiles) / nearest.median_ms if quantiles else np.ones(len(at))
        return np.asarray(self.median_ms(length) * spread)


def mean_ms(clock: Clock, lengths: Array) -> float:
    """Returns the mean of the median times of rows.

    Args:
        clock: The engine.
        lengths: Length that each row is padded to, int64 `[n]`.
    """
    known, counts = np.unique(lengths, return_counts=True)
    return float(np.average([clock.median_ms(int(length)) for length in known], weights=counts))


def live_mix(clocks: Sequence[Clock], asked: Sequence[bool], lengths: Array, answering: Array) -> LiveMix:
    """Returns the times of a cascade, and of each tier alone.

    Args:
        clocks: Of each tier.
        asked: Whether each tier is asked at all; one that keeps no row is not.
        lengths: Length that each evaluation row is padded to, int64 `[n]`.
        answering: Number of the tier that answers it, from 0, int64 `[n]`.
    """
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(lengths), DRAWS)
    drawn = [_drawn(clock, lengths[rows], rng.random(DRAWS)) for clock in clocks]
    total = sum((times * (asked[tier] & (answering[rows] >= tier)) for tier, times in enumerate(drawn)), np.zeros(DRAWS))
    medians = [np.array([clock.median_ms(int(length)) for length in lengths]) for clock in clocks]
    mean = sum(float((times * (answering >= tier)).mean()) for tier, times in enumerate(medians) if asked[tier])
    alone = tuple(_times(float(times.mean()), draws) for times, draws in zip(medians, drawn, strict=True))
    return LiveMix(batch=clocks[0].batch, rows=len(lengths), cascade=_times(mean, total), tiers=alone)


def _drawn(clock: Clock, lengths: Array, at: Array) -> Array:
    times = np.zeros(len(lengths))
    for length in np.unique(lengths):
        times[lengths == length] = clock.draw_ms(int(length), at[lengths == length])
    return times


def _times(mean: float, drawn: Array) -> Times:
    p50, p90, p99 = np.percentile(drawn, (50, 90, 99)).tolist()
    return Times(mean_ms=mean, p50_ms=p50, p90_ms=p90, p99_ms=p99)
