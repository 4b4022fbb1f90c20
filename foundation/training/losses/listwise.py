"""Listwise softmax cross entropy: the score of what is relevant against the scores of all candidates of its query at once.

With the scores s and the grades y of the candidates of a query:

    t_i  = y_i / sum_j y_j
    loss = - sum_i t_i log softmax(s)_i

Of one relevant candidate this is the localized contrastive estimation of Gao, Dai and Callan 2021 (Rethink Training of BERT Rerankers in
Multi-Stage Retrieval Pipeline, https://arxiv.org/abs/2101.08751), of several the softmax cross entropy of Bruch et al. 2019
(https://doi.org/10.1145/3341981.3344221). It is the top-one loss of ListNet (Cao et al. 2007, https://doi.org/10.1145/1273496.1273513) with
the shares of the grades as target in place of their softmax, which gives wrong candidates a share too.

A query without a relevant candidate has the loss 0, and so has a single candidate. Candidates are grouped by the number of their query,
so that their order and the sizes of the queries do not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def listwise(scores_b: Tensor, grades_b: Tensor, numbers_b: Tensor) -> Tensor:
    """Returns for each candidate the loss of its query, float32 `[b]`.

    Args:
        scores_b: Scores, float32.
        grades_b: Grades, float32, at least 0.
        numbers_b: Number of the query of each candidate.
    """
    same_bb = numbers_b[:, None] == numbers_b[None, :]
    logs_b = scores_b - torch.where(same_bb, scores_b[None, :], -torch.inf).logsumexp(dim=1)
    total_b = (same_bb * grades_b[None, :]).sum(dim=1)
    target_b = torch.where(total_b > 0, grades_b / total_b.clamp(min=torch.finfo(grades_b.dtype).tiny), 0.0)
    return -(same_bb * (target_b * logs_b)[None, :]).sum(dim=1)
