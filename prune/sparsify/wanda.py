"""Wanda: scores a weight by its magnitude times the norm of its input (Sun et al. 2023, https://arxiv.org/abs/2306.11695, section 3).

    S_oi = |W_oi| * ||X_i||_2        ||X_i||_2: root of the sum of x_i^2 over all tokens of the calibration rows

Every output has the same sparsity, since scores are comparable within an output only. N:M compares scores within each group; blocks compare
the mean squares of S between all blocks of a layer. No weight is updated. Not supported: the paper's other comparison groups (section 5.2).
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
