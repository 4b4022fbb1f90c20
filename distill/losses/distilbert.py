"""The cosine loss of DistilBERT: last hidden states that point where the teacher's do (https://arxiv.org/abs/1910.01108, section 3).

    loss_b = mean_t (1 - cos(h_s,t, h_t,t))        t: tokens of the row that are no padding

DistilBERT adds it to the soft targets, weights 5 : 1, and to 2 times its masked language model; the preset puts the labels of the task
in the place of the latter. Between different widths a linear map is learned along. Left out: the masked language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from distill.capture import Wanted
from distill.losses.loss import Loss, Seen, Setting, kept, projection, row_mean


class Cosine(Loss):
    """The directions of the last hidden states."""

    name: Literal["cosine"] = "cosine"
    """Directions of the last hidden states."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The hidden states of both."""
        return Wanted(hidden=True), Wanted(hidden=True)

    def build(self, setting: Setting) -> nn.Module | None:
        """The map to the width of the teacher."""
        return projection(setting.student.hidden, setting.teacher.hidden)

    def parts(self, seen: Seen, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `cosine`."""
        assert trained is not None
        student, teacher = seen.student, seen.teacher
        assert student.mask is not None
        assert student.last is not None
        assert teacher.last is not None
        return {"cosine": cosine(trained(student.last), teacher.last, student.mask)}


def cosine(student_bLD: Tensor, teacher_bLD: Tensor, mask_bL: Tensor) -> Tensor:
    """Returns the mean of 1 - cos of each row, float32 `[b]`.

    Args:
        student_bLD: Hidden states, float `[b, L, D]`.
        teacher_bLD: Hidden states, float `[b, L, D]`.
        mask_bL: Tokens that are no padding, bool `[b, L]`.
    """
    student_bLD, teacher_bLD = kept(student_bLD.float(), mask_bL), kept(teacher_bLD.float(), mask_bL)
    return row_mean(1 - functional.cosine_similarity(student_bLD, teacher_bLD, dim=2), mask_bL)
