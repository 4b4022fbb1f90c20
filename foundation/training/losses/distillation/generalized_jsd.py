"""Generalized Jensen-Shannon divergence: between covering all that the teacher does and doing only what it does well.

    p = softmax(z_t / T),  q = softmax(z_s / T),  m = beta p + (1 - beta) q
    loss = T^2 * (beta KL(p || m) + (1 - beta) KL(q || m))

Source: Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, section 2 (equation 2). beta near 0 behaves as KL(p || q), under which a
small student spreads over everything that the teacher might say; beta near 1 as KL(q || p), under which it keeps to what the teacher finds
likely. 0.5 is the Jensen-Shannon divergence. The factor T^2 keeps the gradient's size as T changes. Text: the mean over a row's tokens.
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


class GeneralizedJsd(Loss):
    """Generalized Jensen-Shannon divergence of the two models' probabilities."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True

    name: Literal["generalized_jsd"] = "generalized_jsd"
    """Generalized Jensen-Shannon divergence of the two models' probabilities."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Near 0: the student covers all that the teacher does; near 1: it keeps to what the teacher finds likely."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The logits of both models.

        Raises:
            InputError: The task is a regression, which has no probabilities.
        """
        from foundation.training.distillation.capture import Wanted

        if not setting.facts.answer.PROBABILITIES:
            raise InputError(setting.key, "generalized_jsd given", f"{setting.task} has no probabilities", "give soft_target")
        return Wanted(logits=True), Wanted(logits=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `generalized_jsd`."""
        from foundation.training.losses.table import losses_of

        losses = losses_of(inputs.setting.task)
        student, teacher = (losses.choices(one.logits) for one in (inputs.student, inputs.teacher))
        apart = divergence(student, teacher, self.beta, inputs.temperature)
        return {"generalized_jsd": losses.over_choices(apart, inputs.batch.labels)}


def divergence(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """Returns T^2 (beta KL(p || m) + (1 - beta) KL(q || m)), float32 `[...]`.

    Args:
        student: Logits, float32 `[..., C]`.
        teacher: Logits, float32 `[..., C]`; receives no gradient.
        beta: Weight of the teacher in the mixture m, between 0 and 1.
        temperature: T > 0.
    """
    import torch

    log_q, log_p = (torch.log_softmax(logits / temperature, dim=-1) for logits in (student, teacher.detach()))
    log_m = torch.logaddexp(math.log(beta) + log_p, math.log1p(-beta) + log_q)
    from_teacher, from_student = ((logs.exp() * (logs - log_m)).sum(dim=-1) for logs in (log_p, log_q))
    return temperature**2 * (beta * from_teacher + (1 - beta) * from_student)
