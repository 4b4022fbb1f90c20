"""How far two engines that compute the same model may differ: the one rule of export, `verify`, the server and `build_plans.py`.

    rows with another prediction <= the 99.9 % quantile of a Poisson distribution with mean 0.001 * n, at least 1
    median |difference|          <= 0.02
    every difference is finite

An activation on a rounding boundary that falls to the other side is a visible step in a logit, so correct engines differ in about one row
of a thousand. The largest difference is therefore reported and not judged. Differences are of logits, of the nll of tokens, or of values in
standard deviations of the labels (regression).

Stands alone (standard library and numpy): the repository for GPUs holds a copy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

RATE = 1e-3
"""Share of predictions in which correct engines differ."""
CONFIDENCE = 0.999
MEDIAN_LIMIT = 0.02


def disagreements_allowed(n: int) -> int:
    """Returns how many of n predictions of two correct engines may differ: what chance makes of `RATE`, at least 1."""
    mean = RATE * n
    if mean <= 0:
        return 1
    count = max(0, math.floor(mean - 10 * math.sqrt(mean)))  # the probability below is negligible
    total = _poisson(count, mean)
    while total < CONFIDENCE:
        count += 1
        total += _poisson(count, mean)
    return max(1, count)


def judge(changed: np.ndarray, distance: np.ndarray) -> dict[str, Any]:
    """Judges the differences of two engines on the same rows.

    Args:
        changed: Whether a prediction differs, bool [n].
        distance: Absolute differences, of any shape.

    Returns:
        `disagreements`, `limit`, `median_abs`, `median_limit`, `max_abs`, `n`, `passed`.
    """
    disagreements, limit, median = int(changed.sum()), disagreements_allowed(len(changed)), float(np.median(distance))
    return {
        "disagreements": disagreements,
        "limit": limit,
        "median_abs": median,
        "median_limit": MEDIAN_LIMIT,
        "max_abs": float(distance.max()),
        "n": len(changed),
        "passed": bool(np.isfinite(distance).all()) and disagreements <= limit and median <= MEDIAN_LIMIT,
    }


def _poisson(count: int, mean: float) -> float:
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
