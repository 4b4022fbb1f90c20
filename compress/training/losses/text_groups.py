"""Losses of texts that belong together without a score (`compress.core.forms.text_groups`), one value for each text.

With the vectors a_p, b_p and, of a triplet, n_p of anchor, positive and negative of group p in a batch, as sentence-transformers computes
them where no text occurs twice:

    ranking   loss_p = -log softmax_c(20 cos(a_p, c))[b_p]              MultipleNegativesRankingLoss (https://arxiv.org/abs/1705.00652)
              c: all positives and all given negatives of the batch
    triplet   loss_p = max(0, |a_p - b_p| - |a_p - n_p| + 5)            TripletLoss (https://arxiv.org/abs/1503.03832): Euclidean
                                                                        distances of the vectors as they are
              where the batch has no given negatives:
              loss_p = max(0, |a_p - b_p|^2 - min_c |a_p - c|^2 + 0.2)  of vectors of length 1, with the hardest of the other positives c
                                                                        (https://arxiv.org/abs/1703.07737)

A candidate c counts neither as right nor as wrong for a_p where that would be false: it is the text of a_p or of b_p, or the positive of
another anchor with the text of a_p. sentence-transformers reaches this with batches that no text is in twice (NoDuplicatesBatchSampler);
leaving such candidates out keeps every batch as long as it was, and works where a text occurs more often than there are batches.

All texts of a group get the loss of the group, so that the mean over texts is the mean over groups; texts whose group is not whole get 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from compress.core.forms.text_groups import ANCHOR, NEGATIVE, POSITIVE

SCALE = 20.0
"""Inverse temperature of `ranking`."""
MARGIN = 0.2
"""How much further than the positive the nearest other one has to be, in squared distances; FaceNet's."""
GIVEN_MARGIN = 5.0
"""How much further than the positive a given negative has to be; that of sentence-transformers."""


def group_loss(vectors_bD: Tensor, labels_b4: Tensor, loss: str = "ranking") -> Tensor:
    """Returns the loss of each text, float32 `[b]`.

    Args:
        vectors_bD: Vectors, float32.
        labels_b4: Labels of the texts, float32 (`compress.core.forms.text_groups`).
        loss: `ranking` or `triplet`.
    """
    anchor_P, positive_P, negative_N, own_N = _members(labels_b4)
    vectors_bD = vectors_bD.float()
    if loss == "triplet" and len(negative_N):
        loss_P = _given(vectors_bD, anchor_P, positive_P, negative_N, own_N)
    else:
        candidate_C = torch.cat([positive_P, negative_N])
        texts = labels_b4[anchor_P, 3], labels_b4[positive_P, 3], labels_b4[candidate_C, 3]
        unit_bD = functional.normalize(vectors_bD, dim=1)
        cosine_PC = unit_bD[anchor_P] @ unit_bD[candidate_C].T
        loss_P = (ranking if loss == "ranking" else hardest)(cosine_PC, unclear(*texts))
    whole = torch.cat([anchor_P, positive_P, negative_N])
    losses_b = torch.zeros_like(vectors_bD[:, 0])
    return losses_b.index_add(0, whole, torch.cat([loss_P, loss_P, loss_P[own_N]]))


def ranking(cosine_PC: Tensor, unclear_PC: Tensor) -> Tensor:
    """Returns the loss of each anchor, float32 `[P]`, from its cosines with all candidates, the positives first, in their order."""
    right_P = torch.arange(len(cosine_PC), device=cosine_PC.device)
    return functional.cross_entropy((SCALE * cosine_PC).masked_fill(unclear_PC, -torch.inf), right_P, reduction="none")


def hardest(cosine_PC: Tensor, unclear_PC: Tensor) -> Tensor:
    """Returns the loss of each anchor, float32 `[P]`, from its cosines with the positives `[P, P]`; 0 where no other one is left."""
    if not len(cosine_PC):
        return cosine_PC.sum(dim=1)
    own_PC = torch.eye(*cosine_PC.shape, dtype=torch.bool, device=cosine_PC.device)
    apart_PC = 2 - 2 * cosine_PC
    nearest_P = apart_PC.masked_fill(unclear_PC | own_PC, torch.inf).min(dim=1).values
    return (apart_PC.diagonal() - nearest_P + MARGIN).clamp(min=0)


def unclear(anchor_P: Tensor, positive_P: Tensor, candidate_C: Tensor) -> Tensor:
    """Returns which candidates are no negatives of an anchor, though not its own positive, bool `[P, C]`.

    Args:
        anchor_P: Numbers of the texts of the anchors.
        positive_P: Those of their positives.
        candidate_C: Those of all candidates, the positives first.
    """
    asks_the_same_PP = anchor_P[:, None] == anchor_P[None, :]
    is_positive_PC = positive_P[:, None] == candidate_C[None, :]
    known_PC = (asks_the_same_PP.float() @ is_positive_PC.float()) > 0
    found_PC: Tensor = known_PC | (anchor_P[:, None] == candidate_C[None, :])
    return found_PC & ~torch.eye(*found_PC.shape, dtype=torch.bool, device=found_PC.device)


def _given(vectors_bD: Tensor, anchor_P: Tensor, positive_P: Tensor, negative_N: Tensor, own_N: Tensor) -> Tensor:
    """Returns the loss of each anchor with its given negative, float32 `[P]`; 0 where its negative is not in the batch."""
    anchor_ND = vectors_bD[anchor_P[own_N]]
    near_N, far_N = (torch.linalg.vector_norm(anchor_ND - vectors_bD[others], dim=1) for others in (positive_P[own_N], negative_N))
    loss_N = (near_N - far_N + GIVEN_MARGIN).clamp(min=0)
    return torch.zeros(len(anchor_P), device=loss_N.device, dtype=loss_N.dtype).index_add(0, own_N, loss_N)


def _members(labels_b4: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the rows of the anchors and of the positives of the P groups that have both, of their N negatives, and whose these are.

    Returns:
        int64 `[P]`, `[P]`, `[N]`, `[N]`; anchors and positives in the order of the numbers of the groups.
    """
    numbers_b = labels_b4[:, 1]
    anchor, positive, negative = (torch.nonzero(labels_b4[:, 2] == part)[:, 0] for part in (ANCHOR, POSITIVE, NEGATIVE))
    anchor = anchor[torch.isin(numbers_b[anchor], numbers_b[positive])]
    positive = positive[torch.isin(numbers_b[positive], numbers_b[anchor])]
    negative = negative[torch.isin(numbers_b[negative], numbers_b[anchor])]
    anchor, positive = (rows[torch.argsort(numbers_b[rows], stable=True)] for rows in (anchor, positive))
    own_N = torch.searchsorted(numbers_b[anchor].contiguous(), numbers_b[negative].contiguous())
    return anchor, positive, negative, own_N
