"""Logit standardization: match the shape of the logits, not their scale (https://arxiv.org/abs/2403.01265, section 4).

    Z(z) = (z - mean(z)) / std(z)
    loss_b = T^2 KL(softmax(Z(z_t) / T) || softmax(Z(z_s) / T))

Soft targets force the student to match the range of the teacher's logits, which is hard for a small model. Standardized logits keep only
their proportions. std divides by C - 1. Two classes have no proportions (Z is always +-1/sqrt(2)) and a regression has no classes: both
raise an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from foundation.core.errors import InputError
from foundation.training.losses.distillation.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting

EPSILON = 1e-7


class LogitStandardization(Loss):
    """Soft targets on standardized logits."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True

    name: Literal["logit_standardization"] = "logit_standardization"
    """Soft targets on standardized logits; needs at least three classes."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The logits of both models.

        Raises:
            InputError: There are fewer than three classes, or several of them may hold.
        """
        from foundation.training.distillation.capture import Wanted

        if setting.facts.multi_label:
            raise InputError(
                setting.key, "logit_standardization given", f"the labels of {setting.task} do not exclude each other", "give soft_target"
            )
        if setting.student.classes < 3:
            raise InputError(
                setting.key,
                "logit_standardization given",
                f"it needs at least 3 classes, the model has {setting.student.classes}",
                "give soft_target",
            )
        return Wanted(logits=True), Wanted(logits=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `logit_standardization`."""
        from foundation.training.losses.table import losses_of

        return {
            "logit_standardization": losses_of(inputs.setting.task).taught(
                standardized(inputs.student.logits), standardized(inputs.teacher.logits), inputs.batch.labels, inputs.temperature
            )
        }


def standardized(logits_bC: Tensor) -> Tensor:
    """Returns (z - mean) / std of each row, float32 `[b, C]`; zeros if all logits of a row are equal."""
    return (logits_bC - logits_bC.mean(dim=1, keepdim=True)) / (logits_bC.std(dim=1, keepdim=True) + EPSILON)
