"""Relational distillation: the distances and angles between rows, not the rows themselves (https://arxiv.org/abs/1904.05068, section 3).

    e_i         the row as one vector: the mean of its last hidden states, or the first one
    D_ij        = |e_i - e_j| / mean over i != j of |e_i - e_j|
    A_ijk       = cos of the angle at e_j between e_i and e_k
    distance_i  = mean_j H(D_s,ij - D_t,ij)          H(x) = x^2 / 2 for |x| <= 1, |x| - 1/2 beyond (Huber)
    angle_j     = mean_ik H(A_s,ijk - A_t,ijk)

Widths need not be equal, and a regression gains from it as much as a classification. The rows of a batch are compared with each other:
it has to be in memory whole, and the last one of an epoch, which may be a single row, then teaches nothing. The gradient of a distance
of 0 is taken as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from distill.capture import Captured, Wanted
from distill.losses.loss import Loss, Seen, Setting, check_first

SHORTEST = 1e-12


class Relational(Loss):
    """Distances and angles between the rows of a batch."""

    ACROSS_ROWS: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True

    name: Literal["relational"] = "relational"
    """Distances and angles between the rows of a batch, which has to be in memory whole."""
    distance: Annotated[float, Field(ge=0)] = 25.0
    """Weight of the distances."""
    angle: Annotated[float, Field(ge=0)] = 50.0
    """Weight of the angles; 0 saves their b^3 numbers."""
    tokens: Literal["mean", "first"] = "mean"
    """What stands for a row: the mean of its last hidden states, or the first of them."""

    @model_validator(mode="after")
    def _compares(self) -> Relational:
        if not self.distance and not self.angle:
            raise ValueError("distance and angle: 0 given for both; at least one has to be above 0, or leave relational out")
        return self

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The hidden states of both.

        Raises:
            InputError: The first token does not stand for its row.
        """
        if self.tokens == "first":
            check_first(setting, self.name)
        return Wanted(hidden=True), Wanted(hidden=True)

    def parts(self, seen: Seen, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `distance` and `angle`, those with a weight."""
        student, teacher = self._vectors(seen.student), self._vectors(seen.teacher)
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
        kept_bLD = torch.where(mask_bL[:, :, None], last_bLD, torch.zeros((), device=last_bLD.device))
        return kept_bLD.sum(dim=1) / mask_bL.sum(dim=1, keepdim=True)


def distance_loss(student_bD: Tensor, teacher_bD: Tensor) -> Tensor:
    """Returns the mean over the other rows of the Huber loss of the normalized distances, float32 `[b]`; zeros for a single row.

    Args:
        student_bD: One vector a row, float32 `[b, D_s]`.
        teacher_bD: One vector a row, float32 `[b, D_t]`; takes no gradient.
    """
    rows = len(student_bD)
    if rows < 2:
        return student_bD.sum(dim=1) * 0
    losses_bb = functional.huber_loss(_distances(student_bD), _distances(teacher_bD), reduction="none")
    return losses_bb.sum(dim=1) / (rows - 1)  # the diagonal is 0 - 0


def angle_loss(student_bD: Tensor, teacher_bD: Tensor) -> Tensor:
    """Returns the mean over pairs of other rows of the Huber loss of the cosines at each row, float32 `[b]`; zeros for fewer than 3.

    Args:
        student_bD: One vector a row, float32 `[b, D_s]`.
        teacher_bD: One vector a row, float32 `[b, D_t]`; takes no gradient.
    """
    rows = len(student_bD)
    if rows < 3:
        return student_bD.sum(dim=1) * 0
    losses_bbb = functional.huber_loss(_cosines(student_bD), _cosines(teacher_bD), reduction="none")
    # i = j, k = j and i = k have the same cosine in both, 0 or 1; but where e_i = e_j in one model alone that of i = k is 0 there and 1 in
    # the other: H(1) more, which takes no gradient.
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
    with torch.autocast(units_bbD.device.type, enabled=False):  # 8 bits are too few for a cosine
        return units_bbD @ units_bbD.mT


def _lengths(vectors: Tensor) -> Tensor:
    """Returns the Euclidean lengths over the last axis, with a gradient of 0 where they are 0."""
    squared = vectors.square().sum(dim=-1)
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
