"""Margin-MSE: the scores of two candidates of a query, or of a positive and a negative, differ as much for the student as for the teacher.

With the scores s of the student and t of the teacher, over all pairs (i, j) of candidates of a query:

    loss = mean over the pairs of ((s_i - s_j) - (t_i - t_j))^2

Hofstaetter et al. 2020, Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation
(https://arxiv.org/abs/2010.02666), who take the pairs of a relevant and a wrong passage. All pairs need no labels, and what the teacher
tells of two wrong ones counts too. The level of scores is not learned, only their differences: a reranker orders only by these, so that a
student which is too small for the scores of its teacher need not spend anything on their level.

A single candidate has the loss 0. All candidates of a query get its loss.

Of models of vectors the scores are the dot products of an anchor with its positive and with each of its negatives, and the pairs are those
of the positive with a negative (`foundation.training.losses.margin_mse`). Where vectors point is not learned, so that both models may have
different widths. Margins of a cross-encoder are a column of the data, and a loss of the labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from foundation.core.errors import InputError
from foundation.labels.facts import Facts
from foundation.labels.tasks import tasks_with
from foundation.training.losses.distillation.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting


class MarginMSE(Loss):
    """Differences between the scores of the candidates of a query, or of a positive and its negatives."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True
    TAKES_VECTORS: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True
    NEEDS_NEGATIVES: ClassVar[bool] = True

    name: Literal["margin_mse"] = "margin_mse"
    """Differences between the scores of the candidates of a query, for reranking; of a positive and its negatives, for vectors."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The scores, or vectors, of both models.

        Raises:
            InputError: The task has neither candidates nor negatives.
        """
        from foundation.training.distillation.capture import Wanted

        if not _compares(setting.facts):
            tasks = tasks_with(_compares)
            raise InputError(setting.key, f"{self.name} given for {setting.task}", f"it is for {tasks}", "give another loss")
        return Wanted(logits=True), Wanted(logits=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `margin_mse`."""
        from foundation.training.losses.margin_mse import margin_mse_of

        student, teacher = inputs.student.logits, inputs.teacher.logits
        if inputs.setting.facts.embeds:
            return {"margin_mse": margin_mse_of(student, teacher, inputs.batch.labels)}
        return {"margin_mse": margin_mse(student[:, 0], teacher[:, 0], inputs.batch.labels[:, 1])}


def _compares(row: Facts) -> bool:
    return row.reranks or row.reads_negatives


def margin_mse(student_b: Tensor, teacher_b: Tensor, numbers_b: Tensor) -> Tensor:
    """Returns for each candidate the loss of its query, float32 `[b]`.

    Args:
        student_b: Scores, float32.
        teacher_b: Scores, float32; takes no gradient.
        numbers_b: Number of the query of each candidate.
    """
    import torch

    from foundation.training.precision import in_float32

    with in_float32(student_b):
        error_b = student_b.float() - teacher_b.float()
        same_bb = numbers_b[:, None] == numbers_b[None, :]
        of_row_b = torch.where(same_bb, (error_b[:, None] - error_b[None, :]).square(), 0.0).sum(dim=1)
        size_b = same_bb.sum(dim=1)
        return (same_bb * of_row_b[None, :]).sum(dim=1) / (size_b * (size_b - 1)).clamp(min=1)
