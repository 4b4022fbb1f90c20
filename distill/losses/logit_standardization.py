"""Logit standardization: a student need not shout as loud as its teacher (https://arxiv.org/abs/2403.01265, section 4).

    Z(z) = (z - mean(z)) / std(z)
    loss_b = T^2 KL(softmax(Z(z_t) / T) || softmax(Z(z_s) / T))

Soft targets ask for the same range of logits, which a small model has trouble to reach; standardized, only their proportions are
learned. std divides by C - 1. Two classes have no proportions (Z is always +-1/sqrt(2)), and a regression has no classes: both are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor, nn

from compress.core.errors import InputError
from distill.capture import Wanted
from distill.losses.loss import Loss, Seen, Setting
from distill.losses.soft_target import soft_target

EPSILON = 1e-7


class LogitStandardization(Loss):
    """The teacher's answers, standardized and softened."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True

    name: Literal["logit_standardization"] = "logit_standardization"
    """The teacher's answers, standardized and softened; three classes or more."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The logits of both.

        Raises:
            InputError: There are fewer than three classes.
        """
        if setting.student.classes < 3:
            raise InputError(
                f"{setting.key}: logit_standardization given; {setting.student.classes} outputs leave nothing to learn: give soft_target"
            )
        return Wanted(logits=True), Wanted(logits=True)

    def parts(self, seen: Seen, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `logit_standardization`."""
        return {
            "logit_standardization": soft_target(standardized(seen.student.logits), standardized(seen.teacher.logits), seen.temperature)
        }


def standardized(logits_bC: Tensor) -> Tensor:
    """Returns (z - mean) / std of each row, float32 `[b, C]`; zeros for a row of equal logits."""
    return (logits_bC - logits_bC.mean(dim=1, keepdim=True)) / (logits_bC.std(dim=1, keepdim=True) + EPSILON)
