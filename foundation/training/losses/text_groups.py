"""Losses of texts that belong together without a score (`foundation.labels.text_groups`), one value for each text.

With the vectors a_p, b_p and n_pi of anchor, positive and the negatives i of group p in a batch, as sentence-transformers computes them
where no text occurs twice:

    ranking   loss_p = -log softmax_c(20 cos(a_p, c))[b_p]              MultipleNegativesRankingLoss (https://arxiv.org/abs/1705.00652)
              c: all positives and all given negatives of the batch
    triplet   loss_p = mean_i max(0, |a_p - b_p| - |a_p - n_pi| + 5)    TripletLoss (https://arxiv.org/abs/1503.03832): Euclidean
                                                                        distances of the vectors as they are; of one negative i, as there
              of pairs, where no row has given negatives:
              loss_p = max(0, |a_p - b_p|^2 - min_c |a_p - c|^2 + 0.2)  of vectors of length 1, with the hardest of the other positives c
                                                                        (https://arxiv.org/abs/1703.07737)

A candidate c counts neither as right nor as wrong for a_p where that would be false: it is the text of a_p or of b_p, or the positive of
another anchor with the text of a_p. sentence-transformers reaches this with batches that no text is in twice (NoDuplicatesBatchSampler);
leaving such candidates out keeps every batch as long as it was, and works where a text occurs more often than there are batches.

All texts of a group get the loss of the group, its fillers too, so that the mean over texts is the mean over groups; texts whose group has
no anchor or no positive get 0. Fillers are not candidates.

Several processes gather the texts of a batch (`foundation.training.processes.gathered`); each computes the losses of its own groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from foundation.labels.text_groups import ANCHOR, NEGATIVE, POSITIVE
from foundation.training.precision import in_float32

SCALE = 20.0
"""Inverse temperature of `ranking`."""
MARGIN = 0.2
"""How much further than the positive the nearest other one has to be, in squared distances; FaceNet's."""
GIVEN_MARGIN = 5.0
"""How much further than the positive a given negative has to be, as in sentence-transformers."""


@dataclass(frozen=True)
class Members:
    """The rows of the P groups of a batch that have an anchor and a positive, in the order of the numbers of the groups."""

    anchor_P: Tensor
    """Rows of the anchors, int64."""
    positive_P: Tensor
    """Rows of the positives, int64."""
    negative_N: Tensor
    """Rows of all their negatives, int64."""
    whose_N: Tensor
    """The group of each negative, int64, below P."""
    number_P: Tensor
    """Numbers of the groups, float32, ascending."""

    @classmethod
    def of(cls, labels_b4: Tensor) -> Members:
        """Finds the groups of a batch, in any order of its rows."""
        numbers_b, parts_b = labels_b4[:, 1], labels_b4[:, 2]
        anchor, positive, negative = (torch.nonzero(one)[:, 0] for one in (parts_b == ANCHOR, parts_b == POSITIVE, parts_b >= NEGATIVE))
        anchor = anchor[torch.isin(numbers_b[anchor], numbers_b[positive])]
        positive = positive[torch.isin(numbers_b[positive], numbers_b[anchor])]
        negative = negative[torch.isin(numbers_b[negative], numbers_b[anchor])]
        anchor, positive = (rows[torch.argsort(numbers_b[rows], stable=True)] for rows in (anchor, positive))
        number_P = numbers_b[anchor].contiguous()
        return cls(anchor, positive, negative, torch.searchsorted(number_P, numbers_b[negative].contiguous()), number_P)

    def groups_of(self, labels_b4: Tensor, own_b: Tensor | None) -> Tensor:
        """Returns which groups have one of these rows, bool `[b]`, int64 `[M]`; all of them without."""
        if own_b is None:
            return torch.arange(len(self.anchor_P), device=labels_b4.device)
        return torch.nonzero(torch.isin(self.number_P, labels_b4[own_b, 1]))[:, 0]

    def over_texts(self, loss_P: Tensor, labels_b4: Tensor) -> Tensor:
        """Returns the loss of the group of each text, float32 `[b]`; 0 where its group is not among these."""
        numbers_b = labels_b4[:, 1].contiguous()
        rows = torch.nonzero(torch.isin(numbers_b, self.number_P))[:, 0]
        losses_b = torch.zeros(len(labels_b4), device=loss_P.device, dtype=loss_P.dtype)
        return losses_b.index_add(0, rows, loss_P[torch.searchsorted(self.number_P, numbers_b[rows])])


def group_loss(vectors_bD: Tensor, labels_b4: Tensor, loss: str = "ranking", own_b: Tensor | None = None) -> Tensor:
    """Returns the loss of each text, float32 `[b]`.

    Args:
        vectors_bD: Vectors, float32.
        labels_b4: Labels of the texts, float32 (`foundation.labels.text_groups`).
        loss: `ranking` or `triplet`.
        own_b: The rows whose loss is asked for, bool; the groups of others are candidates. None: all.
    """
    with in_float32(vectors_bD):
        return _group_loss(vectors_bD.float(), labels_b4, loss, own_b)


def _group_loss(vectors_bD: Tensor, labels_b4: Tensor, loss: str, own_b: Tensor | None) -> Tensor:
    members = Members.of(labels_b4)
    if loss == "triplet" and bool((labels_b4[:, 2].abs() >= NEGATIVE).any()):  # fillers too: no micro-batch may decide otherwise
        return members.over_texts(_own_negatives_loss(vectors_bD, members), labels_b4)
    anchors_M = members.groups_of(labels_b4, own_b)
    candidate_C = torch.cat([members.positive_P, members.negative_N])
    texts = labels_b4[members.anchor_P, 3], labels_b4[members.positive_P, 3], labels_b4[candidate_C, 3]
    unit_bD = functional.normalize(vectors_bD, dim=1)
    cosine_MC = unit_bD[members.anchor_P[anchors_M]] @ unit_bD[candidate_C].T
    loss_M = (ranking if loss == "ranking" else hardest)(cosine_MC, unclear(*texts, anchors_M), anchors_M)
    loss_P = torch.zeros(len(members.anchor_P), device=loss_M.device, dtype=loss_M.dtype).index_add(0, anchors_M, loss_M)
    return members.over_texts(loss_P, labels_b4)


def ranking(cosine_MC: Tensor, unclear_MC: Tensor, right_M: Tensor) -> Tensor:
    """Returns the loss of each anchor, float32 `[M]`, from its cosines with all candidates; its positive is candidate `right_M`."""
    return functional.cross_entropy((SCALE * cosine_MC).masked_fill(unclear_MC, -torch.inf), right_M, reduction="none")


def hardest(cosine_MC: Tensor, unclear_MC: Tensor, right_M: Tensor) -> Tensor:
    """Returns the loss of each anchor, float32 `[M]`, from its cosines with all positives; 0 where no other one is left."""
    if not len(cosine_MC):
        return cosine_MC.sum(dim=1)
    apart_MC = 2 - 2 * cosine_MC
    nearest_M = apart_MC.masked_fill(unclear_MC | _own(right_M, cosine_MC), torch.inf).min(dim=1).values
    return (apart_MC.gather(1, right_M[:, None])[:, 0] - nearest_M + MARGIN).clamp(min=0)


def unclear(anchor_P: Tensor, positive_P: Tensor, candidate_C: Tensor, anchors_M: Tensor) -> Tensor:
    """Returns which candidates are not negatives of an anchor, though not its own positive, bool `[M, C]`.

    Args:
        anchor_P: Numbers of the texts of the anchors.
        positive_P: Vectors of their positives.
        candidate_C: Vectors of all candidates, the positives first.
        anchors_M: The anchors that are asked for, int64, below P.
    """
    asked_text_M1 = anchor_P[anchors_M][:, None]
    asks_the_same_MP = asked_text_M1 == anchor_P[None, :]
    is_positive_PC = positive_P[:, None] == candidate_C[None, :]
    known_MC = (asks_the_same_MP.float() @ is_positive_PC.float()) > 0
    found_MC: Tensor = known_MC | (asked_text_M1 == candidate_C[None, :])
    return found_MC & ~_own(anchors_M, found_MC)


def _own(right_M: Tensor, like_MC: Tensor) -> Tensor:
    """Returns which candidate is the positive of an anchor, bool `[M, C]`."""
    return right_M[:, None] == torch.arange(like_MC.shape[1], device=like_MC.device)[None, :]


def _own_negatives_loss(vectors_bD: Tensor, members: Members) -> Tensor:
    """Returns the mean loss of each anchor with its given negatives, float32 `[P]`; 0 where none of them is in the batch."""
    anchor, positive = members.anchor_P[members.whose_N], members.positive_P[members.whose_N]
    near_N, far_N = (torch.linalg.vector_norm(vectors_bD[anchor] - vectors_bD[others], dim=1) for others in (positive, members.negative_N))
    return mean_of_negatives((near_N - far_N + GIVEN_MARGIN).clamp(min=0), members)


def mean_of_negatives(loss_N: Tensor, members: Members) -> Tensor:
    """Returns the mean over the negatives of each group, float32 `[P]`; 0 where it has none."""
    count_P = torch.bincount(members.whose_N, minlength=len(members.anchor_P)).clamp(min=1)
    sums_P = torch.zeros(len(members.anchor_P), device=loss_N.device, dtype=loss_N.dtype).index_add(0, members.whose_N, loss_N)
    return sums_P / count_P
