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
these two compare (`foundation.training.processes.gathered`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foundation.labels.form import Labels
from foundation.labels.text_groups import Groups
from foundation.labels.vectors import Pairs
from foundation.machine.parallel import ALONE, Team
from foundation.training.choices import PairLoss
from foundation.training.losses.answer_loss import SquaredLoss
from foundation.training.losses.margin_mse import margin_mse
from foundation.training.losses.text_groups import MARGIN, SCALE, group_loss
from foundation.training.precision import in_float32
from foundation.training.processes.gathered import gathered

POSITIVE = 0.8
"""Lowest score of a pair whose texts mean the same."""


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
        labels_b2: Number of the pair and score of each text, float32 (`foundation.labels.vectors`).
        loss: Which.
        own_b: The rows whose loss is asked for, bool; the pairs of others are candidates, and may get 0. None: all.
    """
    with in_float32(vectors_bD):
        return _pair_loss(vectors_bD.float(), labels_b2, loss, own_b)


def _pair_loss(vectors_bD: Tensor, labels_b2: Tensor, loss: PairLoss, own_b: Tensor | None) -> Tensor:
    first_P, second_P = partners(labels_b2)
    anchors_M = torch.arange(len(first_P), device=first_P.device)
    if own_b is not None:
        anchors_M = torch.nonzero(own_b[first_P] | own_b[second_P])[:, 0]
    first_M, second_M = first_P[anchors_M], second_P[anchors_M]
    unit_bD, right_M = functional.normalize(vectors_bD, dim=1), labels_b2[first_M, 1] >= POSITIVE
    if loss == "cosine":
        loss_M = ((unit_bD[first_M] * unit_bD[second_M]).sum(dim=1) - labels_b2[first_M, 1]).square()
    elif loss == "triplet":
        apart_MP = 2 - 2 * unit_bD[first_M] @ unit_bD[second_P].T
        own_MP = anchors_M[:, None] == torch.arange(len(first_P), device=first_P.device)[None, :]
        other_M = apart_MP.masked_fill(own_MP, torch.inf).min(dim=1).values if len(first_M) else apart_MP.sum(dim=1)
        loss_M = (apart_MP.gather(1, anchors_M[:, None])[:, 0] - other_M + MARGIN).clamp(min=0) * right_M
    else:
        logits_MP = SCALE * unit_bD[first_M] @ unit_bD[second_P].T
        loss_M = functional.cross_entropy(logits_MP, anchors_M, reduction="none") * right_M
    losses_b = torch.zeros_like(unit_bD[:, 0])
    return losses_b.index_add(0, torch.cat([first_M, second_M]), torch.cat([loss_M, loss_M]))


def chosen(loss: PairLoss | None, labels: Labels | None) -> PairLoss:
    """Returns a loss, or where it is None the usual one of labels: `cosine` of pairs with a score, `margin_mse` of rows with margins, and
    `ranking` of others."""
    if loss is not None:
        return loss
    margins = labels.margins if isinstance(labels, Groups) else None
    return "cosine" if isinstance(labels, Pairs) else "margin_mse" if margins is not None else "ranking"


def compares_rows(loss: PairLoss | None, labels: Labels) -> bool:
    """Whether a loss compares texts of a batch that belong to different pairs or groups; `triplet` with given negatives does not."""
    name, together = chosen(loss, labels), isinstance(labels, Pairs | Groups)
    return together and (name == "ranking" or (name == "triplet" and not (isinstance(labels, Groups) and labels.count())))


def vector_distance(vectors_bD: Tensor, target_bD: Tensor) -> Tensor:
    """Returns |v - t|^2 / |t|^2 of each text, float32 `[b]`; of vectors of length 1 that is 2 - 2 cos(v, t)."""
    return (vectors_bD - target_bD).square().sum(dim=1) / target_bD.square().sum(dim=1).clamp(min=1e-12)


class VectorLoss(SquaredLoss):
    """Vectors `[b, D]`; labels of pairs with a score float32 `[b, 2]`, or of groups without one `[b, 4]`, with margins `[b, 5]`.

    Args:
        labels: Labels of all training rows; None where none is learned.
        loss: The loss of the labels; None: the usual one of their form.
        team: The training processes, which share the rows of a batch.
    """

    def __init__(self, labels: Labels | None = None, loss: PairLoss | None = None, team: Team = ALONE) -> None:
        self.labels, self.loss, self.team = labels, chosen(loss, labels), team
        self.name = self.loss

    def compares_rows(self) -> bool:
        """As `compares_rows` says."""
        return self.labels is not None and compares_rows(self.loss, self.labels)

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The loss of the pair or group that a text belongs to."""
        assert self.labels is not None, "the form of the labels decides"
        compute = pair_loss if isinstance(self.labels, Pairs) else group_loss
        if self.loss == "margin_mse":
            return margin_mse(logits, labels)
        if self.team.data_size == 1 or self.loss == "cosine":
            return compute(logits, labels, self.loss)
        # whether a loss compares rows may depend on the batch, and a collective needs all processes: both that may do gather
        every = gathered(logits, labels, self.team)
        return every.own(compute(every.vectors_nD, every.labels_nk, self.loss, every.own_n))

    def taught(self, logits: Tensor, target: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """|v - t|^2 / |t|^2."""
        return vector_distance(logits, target)
