"""Latencies of engines that took turns: medians, ratios and their 95 % intervals.

    median     of the samples of all turns
    ratio      exp(mean of log(slow_t / fast_t) over the turns that both took): a slow phase of the machine is in both medians of a turn
    interval   exp(mean +- t(n - 1) s / sqrt(n)) with the n turns as the sample, s of the logarithms; Student's t at 97.5 %

Rows without turns, of older runs, have the ratio of their medians and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foundation.core.resampling import student

Row = Mapping[str, Any]


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


def ratio(slow: Row, fast: Row) -> Estimate:
    """Returns how many times faster one latency row is than another at the same shape.

    Args:
        slow: A row of latency.json: `p50_ms` and, if it was timed in turns, `turns_ms` (None for a turn without a usable sample).
        fast: The other row, of the same latency step.
    """
    logarithms = log_ratios(slow, fast)
    if not logarithms:
        return Estimate(float(slow["p50_ms"]) / float(fast["p50_ms"]))
    middle = float(np.mean(logarithms))
    if len(logarithms) == 1:
        return Estimate(math.exp(middle))
    half = half_width(logarithms)
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def log_ratios(slow: Row, fast: Row) -> list[float]:
    """Returns log(slow / fast) for each turn that both rows took."""
    pairs = zip(slow.get("turns_ms") or (), fast.get("turns_ms") or (), strict=False)
    return [math.log(one / other) for one, other in pairs if one and other]
