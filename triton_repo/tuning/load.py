"""Measures a server under rising load: the most rows per second among the loads whose p99 is within a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from triton_repo.load.figures import Figures

SATURATED = 0.95
"""Share of the largest rate from which on a load counts as saturating."""
GAIN = 1.02
"""A load that answers less than this times as many rows as the one before is the last: more requests only wait longer."""
Ask = Callable[[int], Figures]
"""Measures the server with so many requests under way."""


@dataclass(frozen=True)
class Level:
    """One load."""

    concurrency: int
    rows_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    """The largest latency where there were too few requests for a p99; None where nothing was answered."""
    errors: int
    """Requests that were refused, failed or timed out."""

    def within(self, limit_ms: float | None) -> bool:
        """Whether all was answered, and the p99 is within a limit; None: any p99 is."""
        return not self.errors and self.p99_ms is not None and (limit_ms is None or self.p99_ms <= limit_ms)


@dataclass(frozen=True)
class Loaded:
    """Throughput and latency of a server at each load."""

    levels: tuple[Level, ...]
    limit_ms: float | None

    @property
    def best(self) -> Level | None:
        """The load within the limit that answers the most rows; None where none is."""
        return max((level for level in self.levels if level.within(self.limit_ms)), key=lambda level: level.rows_per_s, default=None)

    @property
    def rate(self) -> float:
        """Rows per second of the best load, 0 where none is within the limit."""
        return 0.0 if self.best is None else self.best.rows_per_s


def level_of(figures: Figures) -> Level:
    """Returns one load from its figures."""
    latency = figures["latency_ms"]
    tail = latency["max"] if latency["p99"] is None else latency["p99"]
    errors = sum(about["n"] for about in figures["errors"].values())
    assert figures["concurrency"] is not None, "levels are loads of so many requests"
    return Level(figures["concurrency"], figures["rows_per_s"], latency["p50"], tail, errors)


def loaded(ask: Ask, concurrency: Iterable[int], limit_ms: float | None) -> Loaded:
    """Measures a server under rising load, up to the first that is not within the limit or answers hardly more.

    Args:
        ask: Measures one load.
        concurrency: The loads, ascending.
        limit_ms: Limit of the p99; None: no limit.
    """
    levels: list[Level] = []
    for count in concurrency:
        level = level_of(ask(count))
        levels.append(level)
        if not level.within(limit_ms) or (len(levels) > 1 and level.rows_per_s < GAIN * levels[-2].rows_per_s):
            break
    return Loaded(tuple(levels), limit_ms)


def saturation(levels: Sequence[Level]) -> Level | None:
    """Returns the smallest load at which a server is saturated; None where every load had errors."""
    sound = [level for level in levels if level.within(None)]
    most = max((level.rows_per_s for level in sound), default=0.0)
    return next((level for level in sound if level.rows_per_s >= SATURATED * most), None)
