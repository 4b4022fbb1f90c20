"""DistilBERT's cosine loss: aligns the last hidden states with the teacher's (https://arxiv.org/abs/1910.01108, section 3).

    loss_b = mean_t (1 - cos(h_s,t, h_t,t))        t: tokens of the row, padding excluded

DistilBERT combines it (weight 1) with soft targets (weight 5) and masked language modelling (weight 2). The preset replaces the latter with
the hard-target loss of the task. If the widths differ, a linear projection is trained along with the student. Not supported: the masked
language modelling loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from foundation.training.losses.distillation.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting


class Cosine(Loss):
    """Cosine distance of the last hidden states."""

    name: Literal["cosine"] = "cosine"
    """Cosine distance of the last hidden states."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The hidden states of both models."""
        from foundation.training.distillation.capture import Wanted

        return Wanted(hidden=True), Wanted(hidden=True)

    def build(self, setting: Setting) -> nn.Module | None:
        """The projection to the teacher's width."""
        from foundation.training.losses.distillation.loss import projection

        return projection(setting.student.hidden, setting.teacher.hidden)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `cosine`."""
        assert trained is not None
        student, teacher = inputs.student, inputs.teacher
        assert student.mask is not None
        assert student.last is not None
        assert teacher.last is not None
        return {"cosine": cosine(trained(student.last), teacher.last, student.mask)}


def cosine(student_bLD: Tensor, teacher_bLD: Tensor, mask_bL: Tensor) -> Tensor:
    """Returns 1 - cos, averaged over the tokens of each row, float32 `[b]`.

    Args:
        student_bLD: Hidden states, float `[b, L, D]`.
        teacher_bLD: Hidden states, float `[b, L, D]`.
        mask_bL: False for padding, bool `[b, L]`.
    """
    from torch.nn import functional

    from foundation.training.losses.distillation.loss import row_mean, zero_padding

    student_bLD, teacher_bLD = zero_padding(student_bLD.float(), mask_bL), zero_padding(teacher_bLD.float(), mask_bL)
    return row_mean(1 - functional.cosine_similarity(student_bLD, teacher_bLD, dim=2), mask_bL)
