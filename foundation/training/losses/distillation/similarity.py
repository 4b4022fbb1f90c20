"""Similarity matrices: every two texts of a batch are as similar for the student as for the teacher (https://arxiv.org/abs/1907.09682).

    S_ij   = cos(v_i, v_j)                                v: vectors of the texts
    loss_i = mean over j != i of (S_s,ij - S_t,ij)^2

It says nothing of where the vectors point, only of the angles between them, so that the vectors of student and teacher may have different
widths, and an index of the teacher's vectors is of no use to the student. The paper compares activations of layers and divides each row of
the matrix by its length; cosines are what is searched with. A batch of a single text contributes nothing. Several processes gather the
vectors of a batch (`foundation.training.processes.gathered`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from foundation.training.losses.distillation.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting


class Similarity(Loss):
    """Cosines between the vectors of a batch."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True
    TAKES_VECTORS: ClassVar[bool] = True
    VECTORS_ALONE: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True
    ACROSS_ROWS: ClassVar[bool] = True
    GATHERS: ClassVar[bool] = True

    name: Literal["similarity"] = "similarity"
    """Cosines between the vectors of a batch, for sentence-embedding."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The vectors of both models."""
        from foundation.training.distillation.capture import Wanted

        return Wanted(logits=True), Wanted(logits=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `similarity`."""
        from foundation.training.processes.gathered import gathered

        student_bD, teacher_bE, team = inputs.student.logits, inputs.teacher.logits, inputs.setting.team
        if team.data_size == 1:
            return {"similarity": similarity_loss(student_bD, teacher_bE)}
        every = gathered(student_bD, teacher_bE.float(), team, inputs.batch.counts)
        return {"similarity": every.own(similarity_loss(every.vectors_nD, every.labels_nk, every.own_n))}


def similarity_loss(student_bD: Tensor, teacher_bD: Tensor, own_b: Tensor | None = None) -> Tensor:
    """Returns the mean squared difference of the cosines with all other rows, float32 `[b]`; zeros for a single row.

    Args:
        student_bD: Vectors, float32 `[b, D_s]`.
        teacher_bD: Vectors, float32 `[b, D_t]`; detached.
        own_b: The rows whose loss is asked for, bool; others get 0. None: all.
    """
    import torch
    from torch.nn import functional

    from foundation.training.precision import in_float32

    rows = len(student_bD)
    if rows < 2:
        return student_bD.sum(dim=1) * 0
    with in_float32(student_bD):
        unit = [functional.normalize(vectors.float(), dim=1) for vectors in (student_bD, teacher_bD)]
        asked_m = torch.arange(rows, device=student_bD.device) if own_b is None else torch.nonzero(own_b)[:, 0]
        ours_mb, theirs_mb = (vectors[asked_m] @ vectors.T for vectors in unit)
        loss_m = (ours_mb - theirs_mb).square().sum(dim=1) / (rows - 1)  # the diagonal contributes 0
        return torch.zeros(rows, device=loss_m.device).index_add(0, asked_m, loss_m)
