"""Latencies of engines that took turns: medians, ratios and their 95 % intervals.

    median     of the samples of all turns
    ratio      exp(mean of log(slow_t / fast_t) over the turns that both took): a slow phase of the machine is in both medians of a turn
    interval   exp(mean +- t(n - 1) s / sqrt(n)) with the n turns as the sample, s of the logarithms; Student's t at 97.5 %

Rows without turns, of older runs, have the ratio of their medians and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foundation.core.resampling import student


class Timed(Protocol):
    """A latency row (`foundation.artifacts.timed.Timing`)."""

    @property
    def median_ms(self) -> float:
        """Median of the samples."""

    @property
    def turns_ms(self) -> Sequence[float | None]:
        """Median of each turn, None for a turn without a usable sample; empty for a row that was not timed in turns."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval, which is None where there are fewer than two turns."""

    value: float
    low: float | None = None
    high: float | None = None


def half_width(logarithms: Sequence[float]) -> float:
    """Returns half of the 95 % interval of the mean, by Student's t; infinite for a single value."""
    count = len(logarithms)
    if count < 2:
        return math.inf
    return quantile(count - 1) * float(np.std(logarithms, ddof=1)) / math.sqrt(count)


def quantile(freedom: float) -> float:
    """Returns Student's t at 97.5 %, for one degree of freedom or more."""
    return student(freedom + 1)


def ratio(slow: Timed, fast: Timed) -> Estimate:
    """Returns how many times faster one latency row is than another at the same shape.

    Args:
        slow: A latency row.
        fast: The other row, of the same latency step.
    """
    logarithms = log_ratios(slow, fast)
    if not logarithms:
        return Estimate(slow.median_ms / fast.median_ms)
    middle = float(np.mean(logarithms))
    if len(logarithms) == 1:
        return Estimate(math.exp(middle))
    half = half_width(logarithms)
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def log_ratios(slow: Timed, fast: Timed) -> list[float]:
    """Returns log(slow / fast) for each turn that both rows took."""
    pairs = zip(slow.turns_ms, fast.turns_ms, strict=False)
    return [math.log(one / other) for one, other in pairs if one and other]
