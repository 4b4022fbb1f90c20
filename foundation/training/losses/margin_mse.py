"""MarginMSE: how much nearer a text is to its positive than to a negative, learned as a number (https://arxiv.org/abs/2010.02666).

    s(x, y)  = v_x . v_y                                      the dot product of the vectors as they are
    d_pi     = s(a_p, b_p) - s(a_p, n_pi)                     of anchor, positive and negative i of group p (`forms.text_groups`)
    loss_p   = mean_i (d_pi - m_pi)^2                         m: margins of a teacher, given with the data or computed from its vectors

The paper has one negative for each query and takes the margins of cross-encoders, as a difference of their scores. Only differences are
learned, so that the student may have scores on another level than its teacher; the scale has to be the same, and margins of vectors of
length 1 are at most 2. It compares no rows of different groups. MarginMSELoss of sentence-transformers is the same, with the mean over all
negatives of a batch, which is that over groups where all have as many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundation.training.losses.text_groups import Members, mean_of_negatives

LARGEST = 2.0
"""The largest margin between vectors of length 1."""


def margin_mse(vectors_bD: Tensor, labels_b5: Tensor) -> Tensor:
    """Returns the loss of each text against the margins in its labels, float32 `[b]`; 0 for texts whose group has no negative.

    Args:
        vectors_bD: Vectors, float32.
        labels_b5: Labels of the texts, with margins, float32 (`foundation.labels.text_groups`).
    """
    members = Members.of(labels_b5)
    return _against(margins(vectors_bD, members), labels_b5[members.negative_N, 4], members, labels_b5)


def margin_mse_of(student_bD: Tensor, teacher_bE: Tensor, labels_b4: Tensor) -> Tensor:
    """Returns the loss of each text against the margins of a teacher's vectors, float32 `[b]`.

    Args:
        student_bD: Vectors of the student, float32.
        teacher_bE: Vectors of the teacher, float32, of any width; detached.
        labels_b4: Labels of the texts, float32.
    """
    members = Members.of(labels_b4)
    return _against(margins(student_bD, members), margins(teacher_bE, members), members, labels_b4)


def margins(vectors_bD: Tensor, members: Members) -> Tensor:
    """Returns how much larger the dot product of the anchor is with the positive than with each negative, float32 `[N]`."""
    vectors_bD = vectors_bD.float()
    anchor_ND, positive_ND = (vectors_bD[rows[members.whose_N]] for rows in (members.anchor_P, members.positive_P))
    return (anchor_ND * (positive_ND - vectors_bD[members.negative_N])).sum(dim=1)


def _against(predicted_N: Tensor, target_N: Tensor, members: Members, labels_bk: Tensor) -> Tensor:
    return members.over_texts(mean_of_negatives(torch.square(predicted_N - target_N), members), labels_bk)
