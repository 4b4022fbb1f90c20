"""The cubic schedule: sparsity rises fast while much can go without loss, and slowly as less is left.

    share(p) = 1 - (1 - p)^3        of the sparsity asked for, once the part p of the way is done

Zhu and Gupta 2017, https://arxiv.org/abs/1710.01878, eq. 1 with s_i = 0. Left out: a sparsity to begin with; training starts dense.
"""

from __future__ import annotations


def cubic(done: float) -> float:
    """Returns the share of the sparsity asked for that is there once the part `done` (0 to 1) of the way is."""
    return 1 - (1 - done) ** 3
