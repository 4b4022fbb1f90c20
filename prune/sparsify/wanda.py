"""Wanda: a weight is worth what it does to the output on real rows (Sun et al. 2023, https://arxiv.org/abs/2306.11695, section 3).

    S_oi = |W_oi| * ||X_i||_2        ||X_i||_2: root of the sum of x_i^2 over all tokens of the calibration rows

Each output loses the same share, since only scores of one output are in one unit. With N:M scores are compared inside of each group, with
blocks the mean squares of S of all blocks of a layer. No weight is updated. Left out: the paper's comparison in other groups (section 5.2).
"""

from __future__ import annotations

from torch import Tensor


def wanda(weight_OI: Tensor, squares_I: Tensor) -> Tensor:
    """Returns the score of each weight, float32 `[O, I]`.

    Args:
        weight_OI: float32.
        squares_I: Sum of the squares of each input, float64.
    """
    return weight_OI.abs() * squares_I.sqrt().to(weight_OI)
