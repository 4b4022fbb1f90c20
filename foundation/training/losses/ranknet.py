"""RankNet: of every two candidates of a query with different grades the better one has to have the higher score.

With the scores s and the grades y of the candidates of a query, over the pairs P = {(i, j): y_i > y_j}:

    loss = 1 / |P| sum_(i, j) w_ij log(1 + exp(s_j - s_i))        w_ij = 1

Burges et al. 2005, Learning to Rank using Gradient Descent (https://doi.org/10.1145/1102351.1102363), who sum; the mean makes long
lists count as much as short ones. `foundation.training.losses.lambdarank` weighs the pairs.

A query whose candidates all have one grade has the loss 0. Candidates are grouped by the number of their query, so that their order and
the sizes of the queries do not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def ranknet(scores_b: Tensor, grades_b: Tensor, numbers_b: Tensor) -> Tensor:
    """Returns for each candidate the loss of its query, float32 `[b]`.

    Args:
        scores_b: Scores, float32.
        grades_b: Grades, float32.
        numbers_b: Number of the query of each candidate.
    """
    better_bb = better(grades_b, numbers_b)
    return mean_over_pairs(scores_b, better_bb, better_bb.float(), numbers_b)


def better(grades_b: Tensor, numbers_b: Tensor) -> Tensor:
    """Returns whether candidate i has a larger grade than candidate j of its query, bool `[b, b]`."""
    same_bb: Tensor = numbers_b[:, None] == numbers_b[None, :]
    return same_bb & (grades_b[:, None] > grades_b[None, :])


def mean_over_pairs(scores_b: Tensor, better_bb: Tensor, weights_bb: Tensor, numbers_b: Tensor) -> Tensor:
    """Returns for each candidate the mean over the pairs of its query of w_ij log(1 + exp(s_j - s_i)), float32 `[b]`; 0 without pairs.

    Args:
        scores_b: Scores, float32.
        better_bb: The pairs, bool.
        weights_bb: w, float32; read only at the pairs.
        numbers_b: Number of the query of each candidate.
    """
    losses_bb = functional.softplus(scores_b[None, :] - scores_b[:, None])
    of_better_b = torch.where(better_bb, weights_bb * losses_bb, 0.0).sum(dim=1)
    same_bb = (numbers_b[:, None] == numbers_b[None, :]).float()
    return (same_bb @ of_better_b) / (same_bb @ better_bb.sum(dim=1).float()).clamp(min=1)
