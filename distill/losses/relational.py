"""Relational distillation: match distances and angles between rows (https://arxiv.org/abs/1904.05068, section 3).

    e_i         embedding of row i: the mean of its last hidden states, or the first of them
    D_ij        = |e_i - e_j| / mean over i != j of |e_i - e_j|
    A_ijk       = cos of the angle at e_j between e_i and e_k
    distance_i  = mean_j H(D_s,ij - D_t,ij)          H(x) = x^2 / 2 for |x| <= 1, |x| - 1/2 beyond (Huber)
    angle_j     = mean_ik H(A_s,ijk - A_t,ijk)

Works with different widths, and for regression as well as classification. The loss compares the rows of a batch with each other, so a batch
cannot be split into micro-batches; a batch of a single row, such as the last one of an epoch, contributes nothing. The gradient of a
distance of 0 is defined as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from distill.capture import Captured, Wanted
from distill.losses.loss import Loss, LossInputs, Setting, check_first

SHORTEST = 1e-12


class Relational(Loss):
    """Distances and angles between the rows of a batch."""

    ACROSS_ROWS: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True

    name: Literal["relational"] = "relational"
    """Distances and angles between the rows of a batch; cannot be combined with `micro_batch_size`."""
    distance: Annotated[float, Field(ge=0)] = 25.0
    """Weight of the distances."""
    angle: Annotated[float, Field(ge=0)] = 50.0
    """Weight of the angles; 0 saves the memory of a batch_size^3 tensor."""
    tokens: Literal["mean", "first"] = "mean"
    """How a row becomes one vector: the mean of its last hidden states, or the first of them."""

    @model_validator(mode="after")
    def _compares(self) -> Relational:
        if not self.distance and not self.angle:
            raise ValueError("distance and angle: 0 given for both; give a value above 0 for one, or remove relational")
        return self

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The hidden states of both models.

        Raises:
            InputError: The first token cannot represent its row.
        """
        if self.tokens == "first":
            check_first(setting, self.name)
        return Wanted(hidden=True), Wanted(hidden=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `distance` and `angle`, omitting those of weight 0."""
        student, teacher = self._vectors(inputs.student), self._vectors(inputs.teacher)
        parts = {}
        if self.distance:
            parts["distance"] = self.distance * distance_loss(student, teacher)
        if self.angle:
            parts["angle"] = self.angle * angle_loss(student, teacher)
        return parts

    def _vectors(self, captured: Captured) -> Tensor:
        assert captured.last is not None
        assert captured.mask is not None
        last_bLD, mask_bL = captured.last.float(), captured.mask
        if self.tokens == "first":
            return last_bLD[:, 0]
        masked_bLD = torch.where(mask_bL[:, :, None], last_bLD, torch.zeros((), device=last_bLD.device))
        return masked_bLD.sum(dim=1) / mask_bL.sum(dim=1, keepdim=True)


def distance_loss(student_bD: Tensor, teacher_bD: Tensor) -> Tensor:
    """Returns the Huber loss of the normalized distances, averaged over all other rows, float32 `[b]`; zeros for a single row.

    Args:
        student_bD: One vector per row, float32 `[b, D_s]`.
        teacher_bD: One vector per row, float32 `[b, D_t]`; detached.
    """
    rows = len(student_bD)
    if rows < 2:
        return student_bD.sum(dim=1) * 0
    losses_bb = functional.huber_loss(_distances(student_bD), _distances(teacher_bD), reduction="none")
    return losses_bb.sum(dim=1) / (rows - 1)  # the diagonal contributes 0


def angle_loss(student_bD: Tensor, teacher_bD: Tensor) -> Tensor:
    """Returns the Huber loss of the cosines at each row, averaged over pairs of other rows, float32 `[b]`; zeros for fewer than 3 rows.

    Args:
        student_bD: One vector per row, float32 `[b, D_s]`.
        teacher_bD: One vector per row, float32 `[b, D_t]`; detached.
    """
    rows = len(student_bD)
    if rows < 3:
        return student_bD.sum(dim=1) * 0
    losses_bbb = functional.huber_loss(_cosines(student_bD), _cosines(teacher_bD), reduction="none")
    # i = j, k = j and i = k have the same cosine, 0 or 1, in both models. The exception: if e_i = e_j in only one model, the cosine for i =
    # k is 0 there and 1 in the other, which adds a constant H(1) without gradient.
    return losses_bbb.sum(dim=(1, 2)) / ((rows - 1) * (rows - 2))


def _distances(vectors_bD: Tensor) -> Tensor:
    """Returns D, `[b, b]`."""
    lengths_bb = _lengths(vectors_bD[:, None] - vectors_bD)
    rows = len(vectors_bD)
    return lengths_bb / (lengths_bb.sum() / (rows * (rows - 1))).clamp(min=SHORTEST)


def _cosines(vectors_bD: Tensor) -> Tensor:
    """Returns A as `[j, i, k]`."""
    differences_bbD = vectors_bD - vectors_bD[:, None]  # [j, i]: from e_j to e_i
    units_bbD = differences_bbD / _lengths(differences_bbD)[:, :, None].clamp(min=SHORTEST)
    with torch.autocast(units_bbD.device.type, enabled=False):  # bf16 has too few mantissa bits for a cosine
        return units_bbD @ units_bbD.mT


def _lengths(vectors: Tensor) -> Tensor:
    """Returns the L2 norms over the last axis, with a gradient of 0 where the norm is 0."""
    squared = vectors.square().sum(dim=-1)
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
