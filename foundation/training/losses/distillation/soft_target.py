"""Soft targets: the student learns the teacher's temperature-softened probabilities (https://arxiv.org/abs/1503.02531, section 2).

    p = softmax(z_t / T),  q = softmax(z_s / T)
    loss_b = T^2 * sum_c p_c (log p_c - log q_c)

The gradient of the KL divergence scales with 1 / T^2; the factor T^2 compensates, so the weight relative to the labels need not change with
T. Regression: loss_b = (z_s - z_t)^2. Text generation: loss_b is the mean over the tokens of a block (`foundation.training.token_losses`).
Vectors: loss_b = |v_s - v_t|^2 / |v_t|^2, which is 2 - 2 cos(v_s, v_t) for vectors of length 1.
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


class SoftTarget(Loss):
    """KL divergence from the teacher's temperature-softened probabilities."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True
    TAKES_VECTORS: ClassVar[bool] = True

    name: Literal["soft_target"] = "soft_target"
    """KL divergence from the teacher's temperature-softened probabilities."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The logits of both models.

        Raises:
            InputError: They answer with vectors of different widths.
        """
        from foundation.training.distillation.capture import Wanted

        ours, theirs = setting.student.classes, setting.teacher.classes
        if setting.facts.embeds and ours != theirs:
            raise InputError(
                setting.key,
                f"{self.name} given",
                f"the vectors of the student have {ours} numbers, the teacher's {theirs}",
                "give loss: projected or similarity",
            )
        return Wanted(logits=True), Wanted(logits=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `soft_target`."""
        from foundation.training.losses.table import losses_of

        losses = losses_of(inputs.setting.task)
        return {"soft_target": losses.taught(inputs.student.logits, inputs.teacher.logits, inputs.batch.labels, inputs.temperature)}
