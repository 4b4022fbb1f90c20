"""LambdaRank: RankNet with each pair weighed by what swapping its two candidates would change in NDCG.

With the scores s and the grades y of the candidates of a query, the places r that these scores put them in, over the pairs y_i > y_j:

    w_ij = N |y_i - y_j| |1 / log2(1 + r_i) - 1 / log2(1 + r_j)| / DCG of the perfect order        N: the number of pairs
    loss = mean over the pairs of w_ij log(1 + exp(s_j - s_i))

that is the sum of the pairs weighed by |delta NDCG|: Burges 2010, From RankNet to LambdaRank to LambdaMART (MSR-TR-2010-82).
It is one of the losses of the LambdaLoss framework (Wang et al. 2018, https://doi.org/10.1145/3269206.3271784). The gain of a grade is the
grade itself, as in the NDCG of the report; the papers take 2^y - 1. The weights take no gradient.

Of equal scores the worse candidate comes first, so that a model that scores all alike gains nothing. NDCG is the one of the
candidates at hand, over all their places. A query whose candidates all have one grade has the loss 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundation.training.losses.ranknet import better, mean_over_pairs


def lambdarank(scores_b: Tensor, grades_b: Tensor, numbers_b: Tensor) -> Tensor:
    """Returns for each candidate the loss of its query, float32 `[b]`.

    Args:
        scores_b: Scores, float32.
        grades_b: Grades, float32, at least 0.
        numbers_b: Number of the query of each candidate.
    """
    better_bb, same_bb = better(grades_b, numbers_b), (numbers_b[:, None] == numbers_b[None, :]).float()
    discount_b = 1 / torch.log2(1 + places(scores_b.detach(), grades_b, numbers_b))
    ideal_b = same_bb @ (grades_b / torch.log2(1 + places(grades_b, grades_b, numbers_b)))
    pairs_b = same_bb @ better_bb.sum(dim=1).float()
    changed_bb = (grades_b[:, None] - grades_b[None, :]).abs() * (discount_b[:, None] - discount_b[None, :]).abs()
    weights_bb = torch.where(better_bb, changed_bb * (pairs_b / ideal_b.clamp(min=torch.finfo(ideal_b.dtype).tiny))[:, None], 0.0)
    return mean_over_pairs(scores_b, better_bb, weights_bb, numbers_b)


def places(scores_b: Tensor, grades_b: Tensor, numbers_b: Tensor) -> Tensor:
    """Returns the rank of each candidate within its query, from 1, float32 `[b]`.

    The higher the score the earlier; of equal scores the lower grade comes first, and of equal grades the earlier row.
    """
    same_bb, row_b = numbers_b[:, None] == numbers_b[None, :], torch.arange(len(scores_b), device=scores_b.device)
    before_bb = scores_b[None, :] > scores_b[:, None]
    tie_bb, even_bb = scores_b[None, :] == scores_b[:, None], grades_b[None, :] == grades_b[:, None]
    before_bb = before_bb | (tie_bb & (grades_b[None, :] < grades_b[:, None]))
    before_bb = before_bb | (tie_bb & even_bb & (row_b[None, :] < row_b[:, None]))
    return 1 + (same_bb & before_bb).sum(dim=1).float()
