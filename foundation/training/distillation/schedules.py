"""Schedules for weights and temperatures: a constant, or a linear ramp over the training.

v(t) = start + (end - start) * t / (n - 1)        t: step, from 0; n: total steps
"""

from __future__ import annotations

from foundation.core.config import Config


class Ramp(Config):
    """A value that changes linearly over the training."""

    start: float
    """Value in the first step."""
    end: float
    """Value in the last step."""


def value_at(value: float | Ramp, step: int, num_steps: int) -> float:
    """Returns the value in step `step` (from 0) of `num_steps`."""
    if not isinstance(value, Ramp):
        return value
    return value.start + (value.end - value.start) * step / max(1, num_steps - 1)


def smallest(value: float | Ramp) -> float:
    """Returns the smallest value of the whole training."""
    return min(value.start, value.end) if isinstance(value, Ramp) else value


def always_zero(value: float | Ramp) -> bool:
    """Returns whether a non-negative value is 0 in the whole training."""
    return value == 0 or (isinstance(value, Ramp) and value.start == value.end == 0)
