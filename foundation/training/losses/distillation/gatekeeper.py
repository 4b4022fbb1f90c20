"""Gatekeeper: a student that is sure where it answers as its teacher does, and unsure where it does not (https://arxiv.org/abs/2502.19335,
section 3.2). It is for the first model of a cascade, which passes rows on by its own confidence.

    p = softmax(z_s),  y = argmax z_t,  U the uniform distribution over C classes
    loss_b = alpha * (-log p_y)                   where argmax p = y
             (1 - alpha) * KL(p || U)             elsewhere;   KL(p || U) = log C + sum_c p_c log p_c

Which of the two a row gets follows from the student as it is in this step and has no gradient. The paper compares with the labels. Here the
teacher's answer takes their place, since a cascade promises the answers of its last model. Logits are not softened. A small alpha gives up
answers in which the student is right for confidence that ranks them better; rows on which the two differ are few, so that alpha below 1 / 2
is the usual choice. A regression has no classes, and labels that do not exclude each other have no distribution: both raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from foundation.core.errors import InputError
from foundation.training.losses.distillation.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting


class Gatekeeper(Loss):
    """Sure where student and teacher agree, unsure elsewhere."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True

    name: Literal["gatekeeper"] = "gatekeeper"
    """Sure where student and teacher agree, unsure elsewhere: for the first model of a cascade; needs classes that exclude each other."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Weight of the rows on which they agree, against those on which they do not."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The logits of both models.

        Raises:
            InputError: An answer is not one of several classes.
        """
        from foundation.training.distillation.capture import Wanted

        if setting.facts.answer.CONFIDENCE != "class":
            raise InputError(
                setting.key, "gatekeeper given", f"the answers of {setting.task} are not one of several classes", "give soft_target"
            )
        return Wanted(logits=True), Wanted(logits=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `gatekeeper`."""
        return {"gatekeeper": gatekeeper(inputs.student.logits, inputs.teacher.logits, self.alpha)}


def gatekeeper(student_bC: Tensor, teacher_bC: Tensor, alpha: float) -> Tensor:
    """Returns the loss of each row, float32 `[b]`.

    Args:
        student_bC: Logits, float32 `[b, C]`.
        teacher_bC: Logits, float32 `[b, C]`; take no gradient.
        alpha: Weight of the rows on which both have the same class, in (0, 1).
    """
    import torch

    uniform = math.log(student_bC.shape[1])
    classes_b, logs_bC = teacher_bC.argmax(dim=1), student_bC.log_softmax(dim=1)
    agree_b = student_bC.argmax(dim=1) == classes_b
    sure_b = -logs_bC.gather(1, classes_b[:, None])[:, 0]
    unsure_b = (logs_bC.exp() * logs_bC).sum(dim=1) + uniform
    return torch.where(agree_b, alpha * sure_b, (1 - alpha) * unsure_b)
