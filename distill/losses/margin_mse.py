"""MarginMSE between two models of vectors (https://arxiv.org/abs/2010.02666): the formula is in `compress.training.losses.margin_mse`.

The student learns how much nearer an anchor is to its positive than to its negatives for the teacher. It says nothing of where vectors
point, so that both may have different widths. The paper's teachers are cross-encoders: their margins are a column of the data, and a loss
of the labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor, nn

from compress.training.losses.margin_mse import margin_mse_of
from distill.capture import Wanted
from distill.losses.loss import Loss, LossInputs, Setting


class MarginMse(Loss):
    """Margins between positives and negatives."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True
    TAKES_VECTORS: ClassVar[bool] = True
    VECTORS_ALONE: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True
    NEEDS_NEGATIVES: ClassVar[bool] = True

    name: Literal["margin_mse"] = "margin_mse"
    """How much nearer an anchor is to its positive than to its negatives, for rows with negatives."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The vectors of both models."""
        return Wanted(logits=True), Wanted(logits=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `margin_mse`."""
        return {"margin_mse": margin_mse_of(inputs.student.logits, inputs.teacher.logits, inputs.batch.labels)}
