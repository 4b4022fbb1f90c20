"""Losses of vectors: of texts that come in pairs with a score, one value for each text, and the distance from another model's vectors.

Texts that belong together without a score have losses of their own (`foundation.training.losses.text_groups`).

With the vectors a_p, b_p of the texts of pair p, its score s_p in [0, 1], and P pairs in a batch:

    cosine   loss_p = (cos(a_p, b_p) - s_p)^2                              CosineSimilarityLoss of sentence-transformers
    ranking  loss_p = -log softmax_q(20 cos(a_p, b_q))[p]                  MultipleNegativesRankingLoss (https://arxiv.org/abs/1705.00652):
                      of pairs with s_p >= 0.8; 0 of others                a_p has to find b_p among all second texts of the batch
    triplet  loss_p = max(0, |a_p - b_p|^2 - min_q |a_p - b_q|^2 + 0.2)    of vectors of length 1, q != p (https://arxiv.org/abs/1503.03832)
                      of pairs with s_p >= 0.8; 0 of others                with the hardest negative of the batch
                                                                           (https://arxiv.org/abs/1703.07737)

Both texts of a pair get the loss of the pair, so that the mean over texts is the mean over pairs; a text whose partner is not in the batch
gets 0. Second texts of pairs with a low score are candidates of `ranking` and `triplet` too, but never right. Several processes gather what
these two compare (`foundation.training.gathered`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from foundation.core.forms.text_groups import WITH_MARGINS, are_groups, num_judged
from foundation.core.forms.vectors import are_pairs
from foundation.machine.parallel import ALONE, Team
from foundation.training.choices import PairLoss
from foundation.training.gathered import gathered
from foundation.training.losses.answer_loss import AnswerLoss, drawn_normal, weighted_sum
from foundation.training.losses.margin_mse import margin_mse
from foundation.training.losses.text_groups import MARGIN, SCALE, group_loss
from foundation.training.precision import in_float32

POSITIVE = 0.8
"""Score from which on the texts of a pair say the same."""
SCORED = 2
"""Columns of the labels of pairs with a score."""


def partners(labels_b2: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of the first and of the second text of each complete pair of a batch, int64 `[P]` each."""
    order = torch.argsort(labels_b2[:, 0], stable=True)
    numbers = labels_b2[order, 0]
    first = torch.nonzero(numbers[:-1] == numbers[1:])[:, 0]
    return order[first], order[first + 1]


def pair_loss(vectors_bD: Tensor, labels_b2: Tensor, loss: PairLoss = "cosine", own_b: Tensor | None = None) -> Tensor:
    """Returns the loss of each text, float32 `[b]`.

    Args:
        vectors_bD: Vectors, float32.
        labels_b2: Number of the pair and score of each text, float32 (`foundation.core.forms.vectors`).
        loss: Which.
        own_b: The rows whose loss is asked for, bool; the pairs of others are candidates, and may get 0. None: all.
    """
    with in_float32(vectors_bD):
        return _pair_loss(vectors_bD.float(), labels_b2, loss, own_b)


def _pair_loss(vectors_bD: Tensor, labels_b2: Tensor, loss: PairLoss, own_b: Tensor | None) -> Tensor:
    first_P, second_P = partners(labels_b2)
    asked_M = torch.arange(len(first_P), device=first_P.device)
    if own_b is not None:
        asked_M = torch.nonzero(own_b[first_P] | own_b[second_P])[:, 0]
    first_M, second_M = first_P[asked_M], second_P[asked_M]
    unit_bD, right_M = functional.normalize(vectors_bD, dim=1), labels_b2[first_M, 1] >= POSITIVE
    if loss == "cosine":
        loss_M = ((unit_bD[first_M] * unit_bD[second_M]).sum(dim=1) - labels_b2[first_M, 1]).square()
    elif loss == "triplet":
        apart_MP = 2 - 2 * unit_bD[first_M] @ unit_bD[second_P].T
        own_MP = asked_M[:, None] == torch.arange(len(first_P), device=first_P.device)[None, :]
        other_M = apart_MP.masked_fill(own_MP, torch.inf).min(dim=1).values if len(first_M) else apart_MP.sum(dim=1)
        loss_M = (apart_MP.gather(1, asked_M[:, None])[:, 0] - other_M + MARGIN).clamp(min=0) * right_M
    else:
        logits_MP = SCALE * unit_bD[first_M] @ unit_bD[second_P].T
        loss_M = functional.cross_entropy(logits_MP, asked_M, reduction="none") * right_M
    losses_b = torch.zeros_like(unit_bD[:, 0])
    return losses_b.index_add(0, torch.cat([first_M, second_M]), torch.cat([loss_M, loss_M]))


def chosen(loss: PairLoss | None, labels: Tensor | NDArray[Any]) -> PairLoss:
    """Returns a loss, or where it is None the usual one of labels.

    That is `cosine` of pairs with a score `[n, 2]`, `margin_mse` of rows with margins `[n, 5]`, and `ranking` of others `[n, 4]`.
    """
    return loss or ("cosine" if labels.shape[1] == SCORED else "margin_mse" if labels.shape[1] == WITH_MARGINS else "ranking")


def compares_rows(loss: PairLoss, labels: NDArray[Any]) -> bool:
    """Whether a loss compares texts of a batch that belong to different groups; `triplet` with given negatives does not."""
    return loss == "ranking" or (loss == "triplet" and not (are_groups(labels) and num_judged(labels)))


def compares_vectors(loss: PairLoss | None, labels: NDArray[Any]) -> bool:
    """Whether labels of any task are of texts that belong together, and the loss compares such as belong to different groups."""
    return (are_pairs(labels) or are_groups(labels)) and compares_rows(chosen(loss, labels), labels)


def vector_distance(vectors_bD: Tensor, target_bD: Tensor) -> Tensor:
    """Returns |v - t|^2 / |t|^2 of each text, float32 `[b]`; of vectors of length 1 that is 2 - 2 cos(v, t)."""
    return (vectors_bD - target_bD).square().sum(dim=1) / target_bD.square().sum(dim=1).clamp(min=1e-12)


class VectorLoss(AnswerLoss):
    """Vectors `[b, D]`; pairs with a score float32 `[b, 2]`, or texts that belong together without one `[b, 4]`, with margins `[b, 5]`.

    Args:
        loss: The loss of the labels; None: the usual one of their kind.
        team: The training processes, which share the rows of a batch.
    """

    def __init__(self, loss: PairLoss | None = None, team: Team = ALONE) -> None:
        self.loss, self.team = loss, team

    def named(self, labels: Tensor) -> PairLoss:
        """The loss that was chosen, or the usual one of these labels."""
        return chosen(self.loss, labels)

    def compares_rows(self, labels: NDArray[Any]) -> bool:
        """As `compares_rows` says of the loss and the labels of all rows."""
        return compares_vectors(self.loss, labels)

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The loss of the pair or triplet that a text belongs to."""
        name, compute = self.named(labels), pair_loss if labels.shape[1] == SCORED else group_loss
        if name == "margin_mse":
            return margin_mse(logits, labels)
        if self.team.data_size == 1 or name == "cosine":
            return compute(logits, labels, name)
        # whether a loss compares rows may depend on the batch, and a collective needs all processes: both that may do gather
        every = gathered(logits, labels, self.team)
        return every.own(compute(every.vectors_nD, every.labels_nk, name, every.own_n))

    def taught(self, logits: Tensor, target: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """|v - t|^2 / |t|^2."""
        return vector_distance(logits, target)

    def averaged(self, logits: Sequence[Tensor], weights: Sequence[float], temperature: float) -> Tensor:
        """The weighted sum."""
        return weighted_sum(logits, weights)

    def drawn_gradient(self, logits: Tensor, labels: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """Normal numbers: the loss is a squared difference."""
        return drawn_normal(logits, generator)
