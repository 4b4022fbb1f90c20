"""The learning rate of every step, and steps as a share of all.

lr(t) = peak * min(1, (t + 1) / warmup) during warm-up, then linear or half a cosine down to 0
"""

from __future__ import annotations

import math
from typing import Literal

ROUNDING = 1e-9


def steps_in(factor: float, num_steps: int) -> int:
    """Returns `factor * num_steps`, rounded up; tolerates rounding errors, so that 1.1 * 50 is 55."""
    return math.ceil(factor * num_steps - ROUNDING)


def learning_rate(step: int, num_steps: int, peak: float, warmup: float, schedule: Literal["linear", "cosine", "constant"]) -> float:
    """Returns the learning rate of step `step` (from 0) of `num_steps`."""
    rising = steps_in(warmup, num_steps)
    if step < rising:
        return peak * (step + 1) / rising
    if schedule == "constant":
        return peak
    done = (step - rising) / max(1, num_steps - rising)
    return peak * (1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))
