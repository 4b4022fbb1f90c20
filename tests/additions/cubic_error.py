"""Cubed distance of the answers: loss_b = mean_c |z_bc - t_bc|^3, z the student's logits, t the teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor, nn

from distill.capture import Wanted
from distill.losses.loss import Loss, LossInputs, Setting


class CubicError(Loss):
    """The cubed distance of the answers."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True

    name: Literal["cubic_error"] = "cubic_error"
    """The cubed distance of the answers."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The logits of both."""
        return Wanted(logits=True), Wanted(logits=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `cubic_error`."""
        return {"cubic_error": (inputs.student.logits - inputs.teacher.logits).abs().pow(3).mean(dim=1)}
