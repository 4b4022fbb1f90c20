"""How far two engines that compute the same model may differ: the one rule of export, `verify`, the server and `build_plans.py`.

    rows with another prediction <= the 99.9 % quantile of a Poisson distribution with mean 0.001 * n, at least 1
    median |difference|          <= 0.02
    every difference is finite

An engine whose float part runs in 16 bits rounds every value, so that codes of int8 layers flip in every row. Its limits are wider:

    fp16, bf16   the same quantile with mean 0.01 * n; median <= 0.05 in fp16, 0.1 in bf16

Those are chosen: on SST-2 int8 engines whose rest is bf16 predicted otherwise than torch in half a row of a hundred (benchmarks/README.md).
An engine that drops a layer, a mask or a scale is far outside.

An activation on a rounding boundary that falls to the other side is a visible step in a logit, so correct engines differ in about one row
of a thousand. The largest difference is therefore reported and not judged. Differences are of logits, of the nll of tokens, or of values in
standard deviations of the labels (regression).

Standalone (standard library and numpy): the repository for GPUs holds a copy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

RATE = 1e-3
"""Share of predictions in which correct engines differ."""
CONFIDENCE = 0.999
MEDIAN_LIMIT = 0.02
LIMITS = {"fp32": (RATE, MEDIAN_LIMIT), "fp16": (1e-2, 0.05), "bf16": (1e-2, 0.1)}
"""Share of predictions and median difference by what the float part runs in."""


def disagreements_allowed(n: int, rate: float = RATE) -> int:
    """Returns how many of n predictions of two correct engines may differ: what chance makes of `rate`, at least 1."""
    mean = rate * n
    if mean <= 0:
        return 1
    count = max(0, math.floor(mean - 10 * math.sqrt(mean)))  # the probability below is negligible
    total = _poisson(count, mean)
    while total < CONFIDENCE:
        count += 1
        total += _poisson(count, mean)
    return max(1, count)


def judge(changed: np.ndarray, distance: np.ndarray, float_precision: str = "fp32") -> dict[str, Any]:
    """Judges the differences of two engines on the same rows.

    Args:
        changed: Whether a prediction differs, bool [n].
        distance: Absolute differences, of any shape.
        float_precision: What the float part of the less exact one runs in: fp32, fp16 or bf16.

    Returns:
        `disagreements`, `limit`, `median_abs`, `median_limit`, `max_abs`, `n`, `passed`.
    """
    rate, median_limit = LIMITS[float_precision]
    disagreements, limit, median = int(changed.sum()), disagreements_allowed(len(changed), rate), float(np.median(distance))
    return {
        "disagreements": disagreements,
        "limit": limit,
        "median_abs": median,
        "median_limit": median_limit,
        "max_abs": float(distance.max()),
        "n": len(changed),
        "passed": bool(np.isfinite(distance).all()) and disagreements <= limit and median <= median_limit,
    }


def _poisson(count: int, mean: float) -> float:
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
