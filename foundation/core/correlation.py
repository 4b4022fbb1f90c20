"""Correlation of two arrays of numbers. Uses only numpy.

pearson  = cov(x, y) / (sd(x) sd(y));  spearman = pearson of the ranks, ties share their average rank
"""

from __future__ import annotations

import math

import numpy as np

from foundation.core.arrays import Array


def pearson(x: Array, y: Array) -> float:
    """Returns the linear correlation of two arrays of n numbers, in float64; 0 if either is constant."""
    x, y = x.reshape(-1).astype(np.float64), y.reshape(-1).astype(np.float64)
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # the mean of equal values may differ from them by a rounding error
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    x, y = x / np.abs(x).max(), y / np.abs(y).max()  # squares of tiny or huge values would underflow or overflow
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return min(1.0, max(-1.0, float(x @ y) / scale)) if scale else 0.0


def spearman(x: Array, y: Array) -> float:
    """Returns the rank correlation of two arrays of n numbers; 0 if either is constant."""
    return pearson(ranks(x.reshape(-1)), ranks(y.reshape(-1)))


def ranks(x: Array) -> Array:
    """Returns the ranks 1..n of an `[n]` array; equal values share the average of their ranks."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Array = (last - (counts - 1) / 2)[inverse]
    return mean
