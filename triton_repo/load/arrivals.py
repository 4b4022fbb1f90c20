"""When requests are due, for an open loop: a Poisson process.

    gaps between two arrivals     E_i ~ Exponential(rate), independent
    arrivals                      t_i = E_1 + ... + E_i,  all t_i < seconds

The number of arrivals in a window of w seconds is then Poisson: mean = variance = rate * w. Many independent users come like this: their
requests bunch up, so queues form at rates that evenly spaced requests of the same rate would pass without waiting.

Left out: bursts, rates that change with time, recorded traces.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def poisson(rate: float, seconds: float, seed: int) -> NDArray[np.float64]:
    """Returns the times in seconds at which requests are due, float64 [n], ascending, all in [0, seconds).

    Args:
        rate: Mean number of arrivals per second, above 0.
        seconds: Length of the schedule.
        seed: The same seed gives the same times.
    """
    generator = np.random.default_rng(seed)
    mean = rate * seconds
    block = int(mean + 5 * mean**0.5) + 16  # nearly always enough at once
    times = generator.exponential(1 / rate, block).cumsum()
    while times[-1] < seconds:
        times = np.concatenate([times, times[-1] + generator.exponential(1 / rate, block).cumsum()])
    return times[times < seconds]
