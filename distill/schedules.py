"""Weights and temperatures that change over the training: a number, or a straight line from one to another.

v(t) = start + (end - start) * t / (n - 1)        t: number of the step, from 0; n: steps in all
"""

from __future__ import annotations

from compress.core.config import Config


class Ramp(Config):
    """A value that changes in a straight line over the training."""

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
    """Returns whether a value that is never below 0 is 0 in the whole training."""
    return value == 0 or (isinstance(value, Ramp) and value.start == value.end == 0)
