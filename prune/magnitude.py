"""Magnitude: importance as the norm of a unit's weights.

    score_s = sqrt( sum over the weights w of s of w^2 )         the group norm of group lasso

Han et al. 2015, https://arxiv.org/abs/1506.02626, section 3; for groups: Li et al. 2017, https://arxiv.org/abs/1608.08710, section 3.1.
Since no data is used, scores of different layers are not comparable; `prune.scores` divides them by their mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def magnitude(slices: Sequence[Tensor]) -> Tensor:
    """Returns the score of each unit, float32 `[S]`.

    Args:
        slices: Weights, float `[S, n]` each: one row per unit with all of its entries in that weight.
    """
    return torch.stack([slice_Sn.float().square().sum(dim=1) for slice_Sn in slices]).sum(dim=0).sqrt()
