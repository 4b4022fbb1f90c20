"""Losses of the scores of candidates, which a search found for a query and a model puts in order, and their names.

    listwise     softmax over the candidates of a query          `foundation.training.losses.listwise`
    ranknet      every two candidates with different grades      `foundation.training.losses.ranknet`
    lambdarank   the same, weighed by their places               `foundation.training.losses.lambdarank`
    pointwise    each candidate for itself                       `foundation.training.losses.pointwise`

All candidates of a query get its loss, so that the mean over rows weighs queries by their candidates. Only candidates with the same number
are compared (`foundation.labels.candidates`), and these are never parted (`foundation.training.processes.dealing`): micro-batches and
processes change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from foundation.training.choices import OrderLoss
from foundation.training.losses.lambdarank import lambdarank
from foundation.training.losses.listwise import listwise
from foundation.training.losses.pointwise import pointwise
from foundation.training.losses.ranknet import ranknet
from foundation.training.losses.value import ValueLoss
from foundation.training.precision import in_float32

USUAL: OrderLoss = "listwise"
OVER_LISTS: Mapping[OrderLoss, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "listwise": listwise,
    "ranknet": ranknet,
    "lambdarank": lambdarank,
}
"""Functions of scores, grades and numbers of queries, float32 `[b]` each."""


class CandidateLoss(ValueLoss):
    """Logits `[b, 1]`, labels of candidates float32 `[b, 13]` (`foundation.labels.candidates`).

    Args:
        loss: The loss of the labels; None: the usual one.
    """

    def __init__(self, loss: OrderLoss | None = None) -> None:
        self.loss: OrderLoss = loss or USUAL
        self.name = self.loss

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The loss of the query of a candidate, or with `pointwise` the loss of the candidate itself."""
        with in_float32(logits):
            scores_b, numbers_b, grades_b = logits[:, 0].float(), labels[:, 1], labels[:, 2]
            if self.loss == "pointwise":
                return pointwise(scores_b, grades_b, labels[:, 3])
            return OVER_LISTS[self.loss](scores_b, grades_b, numbers_b)
