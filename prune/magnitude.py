"""Magnitude: how large the weights are that a structure consists of.

    score_s = sqrt( sum over the weights w of s of w^2 )         the norm of the group that group lasso shrinks

Small weights as unimportant ones: Han et al. 2015, https://arxiv.org/abs/1506.02626, section 3; in groups: Li et al. 2017,
https://arxiv.org/abs/1608.08710, section 3.1. Data has no say, so that scores of different layers are not comparable as they are: they are
divided by their mean (`prune.scores`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def magnitude(slices: Sequence[Tensor]) -> Tensor:
    """Returns the score of each structure, float32 `[S]`.

    Args:
        slices: Weights float `[S, n]` each: a row for every structure, with all of its entries in that weight.
    """
    return torch.stack([slice_Sn.float().square().sum(dim=1) for slice_Sn in slices]).sum(dim=0).sqrt()
