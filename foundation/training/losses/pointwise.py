"""Pointwise cross entropy: each candidate of a query for itself, as relevant or not.

    y_i    = grade of the candidate / largest grade of any document for its query        in [0, 1]; 0 where nothing is relevant
    loss_i = -y_i log sigmoid(s_i) - (1 - y_i) log(1 - sigmoid(s_i))

BinaryCrossEntropyLoss of sentence-transformers' cross-encoders, of monoBERT (Nogueira and Cho 2019, https://arxiv.org/abs/1901.04085). A
score has a meaning of its own here, the probability of being relevant; the losses over a list know only differences of scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def pointwise(scores_b: Tensor, grades_b: Tensor, largest_b: Tensor) -> Tensor:
    """Returns the loss of each candidate, float32 `[b]`.

    Args:
        scores_b: Scores, float32.
        grades_b: Grades, float32, at least 0.
        largest_b: The largest grade of any document for its query, float32.
    """
    target_b = torch.where(largest_b > 0, grades_b / largest_b.clamp(min=torch.finfo(grades_b.dtype).tiny), 0.0)
    return functional.binary_cross_entropy_with_logits(scores_b, target_b, reduction="none")
