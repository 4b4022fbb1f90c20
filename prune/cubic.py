"""The cubic schedule: sparsity rises fast while there is much redundancy, and slowly towards the end.

    share(p) = 1 - (1 - p)^3        share of the final sparsity after the fraction p of the schedule

Zhu and Gupta 2017, https://arxiv.org/abs/1710.01878, eq. 1 with s_i = 0. Not supported: an initial sparsity; training starts dense.
"""

from __future__ import annotations


def cubic(done: float) -> float:
    """Returns the share of the final sparsity after the fraction `done` (0 to 1) of the schedule."""
    return 1 - (1 - done) ** 3
