"""Relational distillation: match distances and angles between rows (https://arxiv.org/abs/1904.05068, section 3).

    e_i         embedding of row i: the mean of its last hidden states, or the first of them
    D_ij        = |e_i - e_j| / mean over i != j of |e_i - e_j|
    A_ijk       = cos of the angle at e_j between e_i and e_k
    distance_i  = mean_j H(D_s,ij - D_t,ij)          H(x) = x^2 / 2 for |x| <= 1, |x| - 1/2 beyond (Huber)
    angle_j     = mean_ik H(A_s,ijk - A_t,ijk)

Works with different widths, and for regression as well as classification. The loss compares the rows of a batch with each other, so a batch
cannot be split into micro-batches; a batch of a single row, such as the last one of an epoch, contributes nothing. The gradient of a
distance of 0 is defined as 0. Several processes gather the vectors of a batch (`foundation.training.processes.gathered`): each compares its
own rows with all, and the mean distance is taken over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from foundation.training.losses.distillation.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Captured, Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting

SHORTEST = 1e-12


class Relational(Loss):
    """Distances and angles between the rows of a batch."""

    ACROSS_ROWS: ClassVar[bool] = True
    GATHERS: ClassVar[bool] = True
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
        from foundation.training.distillation.capture import Wanted
        from foundation.training.losses.distillation.loss import check_first

        if self.tokens == "first":
            check_first(setting, self.name)
        return Wanted(hidden=True), Wanted(hidden=True)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `distance` and `angle`, omitting terms of weight 0."""
        from foundation.training.processes.gathered import gathered

        student_bD, teacher_bE, team = self._vectors(inputs.student), self._vectors(inputs.teacher), inputs.setting.team
        if team.data_size == 1:
            return self._compared(student_bD, teacher_bE)
        every = gathered(student_bD, teacher_bE, team, inputs.batch.counts)
        losses = self._compared(every.vectors_nD, every.labels_nk, every.own_n, every.total)
        return {name: every.own(loss_n) for name, loss_n in losses.items()}

    def _compared(
        self, student_bD: Tensor, teacher_bE: Tensor, own_b: Tensor | None = None, total: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        parts = {}
        if self.distance:
            parts["distance"] = self.distance * distance_loss(student_bD, teacher_bE, own_b, total)
        if self.angle:
            parts["angle"] = self.angle * angle_loss(student_bD, teacher_bE, own_b)
        return parts

    def _vectors(self, captured: Captured) -> Tensor:
        import torch

        assert captured.last is not None
        assert captured.mask is not None
        last_bLD, mask_bL = captured.last.float(), captured.mask
        if self.tokens == "first":
            return last_bLD[:, 0]
        masked_bLD = torch.where(mask_bL[:, :, None], last_bLD, torch.zeros((), device=last_bLD.device))
        return masked_bLD.sum(dim=1) / mask_bL.sum(dim=1, keepdim=True)


def distance_loss(
    student_bD: Tensor, teacher_bD: Tensor, own_b: Tensor | None = None, total: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Returns the Huber loss of the normalized distances, averaged over all other rows, float32 `[b]`; zeros for a single row.

    Args:
        student_bD: One vector per row, float32 `[b, D_s]`.
        teacher_bD: One vector per row, float32 `[b, D_t]`; detached.
        own_b: The rows whose loss is asked for, bool; others get 0. None: all.
        total: Turns the sums of distances over these rows (student, teacher), `[2]`, into sums over all rows. None: these are all rows.
    """
    import torch
    from torch.nn import functional

    rows = len(student_bD)
    if rows < 2:
        return student_bD.sum(dim=1) * 0
    ours_mb, theirs_mb = (_lengths(_chosen(vectors, own_b)[:, None] - vectors) for vectors in (student_bD, teacher_bD))
    sums_2 = torch.stack([ours_mb.sum(), theirs_mb.sum()])
    means_2 = ((sums_2 if total is None else total(sums_2)) / (rows * (rows - 1))).clamp(min=SHORTEST)
    losses_mb = functional.huber_loss(ours_mb / means_2[0], theirs_mb / means_2[1].detach(), reduction="none")
    return _placed(losses_mb.sum(dim=1) / (rows - 1), own_b)  # the diagonal contributes 0


def angle_loss(student_bD: Tensor, teacher_bD: Tensor, own_b: Tensor | None = None) -> Tensor:
    """Returns the Huber loss of the cosines at each row, averaged over pairs of other rows, float32 `[b]`; zeros for fewer than 3 rows.

    Args:
        student_bD: One vector per row, float32 `[b, D_s]`.
        teacher_bD: One vector per row, float32 `[b, D_t]`; detached.
        own_b: The rows whose loss is asked for, bool; others get 0. None: all.
    """
    from torch.nn import functional

    rows = len(student_bD)
    if rows < 3:
        return student_bD.sum(dim=1) * 0
    ours_mbb, theirs_mbb = (_cosines(vectors, own_b) for vectors in (student_bD, teacher_bD))
    losses_mbb = functional.huber_loss(ours_mbb, theirs_mbb, reduction="none")
    # i = j, k = j and i = k have the same cosine, 0 or 1, in both models. The exception: if e_i = e_j in only one model, the cosine for i =
    # k is 0 there and 1 in the other, which adds a constant H(1) without gradient.
    return _placed(losses_mbb.sum(dim=(1, 2)) / ((rows - 1) * (rows - 2)), own_b)


def _cosines(vectors_bD: Tensor, own_b: Tensor | None = None) -> Tensor:
    """Returns A as `[j, i, k]`, of the asked rows j."""
    from foundation.training.precision import in_float32

    differences_mbD = vectors_bD - _chosen(vectors_bD, own_b)[:, None]  # [j, i]: from e_j to e_i
    units_mbD = differences_mbD / _lengths(differences_mbD)[:, :, None].clamp(min=SHORTEST)
    with in_float32(units_mbD):
        return units_mbD @ units_mbD.mT


def _chosen(vectors_bD: Tensor, own_b: Tensor | None) -> Tensor:
    """Returns the vectors of the asked rows, `[m, D]`."""
    return vectors_bD if own_b is None else vectors_bD[own_b]


def _placed(losses_m: Tensor, own_b: Tensor | None) -> Tensor:
    """Returns the losses of the asked rows at their places in the batch, `[b]`; 0 elsewhere."""
    import torch

    if own_b is None:
        return losses_m
    return losses_m.new_zeros(len(own_b)).index_add(0, torch.nonzero(own_b)[:, 0], losses_m)


def _lengths(vectors: Tensor) -> Tensor:
    """Returns the L2 norms over the last axis, with a gradient of 0 where the norm is 0."""
    import torch

    squared = vectors.square().sum(dim=-1)
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
