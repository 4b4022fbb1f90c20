"""Projected vectors: a student whose vectors are narrower learns those of its teacher through a projection.

    pca      loss_b = |u(v_s) - u(B v_t)|^2              B: the D_s directions in which the teacher's vectors of the training rows differ
    most learned  loss_b = |u(P v_s) - u(v_t)|^2              P [D_t, D_s] is trained with the student and then left out
    (https://arxiv.org/abs/1412.6550)

with u(v) = v / |v|, so that the loss is 2 - 2 cos. With `pca` the angles between the student's vectors become those of the teacher's in
these directions; with `learned` nothing says what the student's angles are but that a linear layer finds the teacher's in them. Neither
keeps an index of the teacher's vectors of use.

The directions are the right singular vectors of the centred vectors, the largest first, as sentence-transformers reduces dimensions; each
with the sign that makes its largest entry positive. Cosines of B v_t are not those of v_t: what the directions left out held is lost to any
student of this width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.core.errors import InputError
from compress.models.forward import device_of, on_device
from compress.training.precision import in_float32
from distill.capture import Wanted
from distill.losses.loss import Loss, LossInputs, Setting
from distill.teacher import Pair

MOST_ROWS = 10_000
"""Rows that the directions are computed from."""
BATCH_SIZE = 64


class Directions(nn.Module):
    """The directions that vectors are projected to.

    Args:
        ours: Width of the student's vectors.
        theirs: Width of the teacher's.
    """

    basis: Tensor
    fitted: Tensor

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(ours, theirs))
        self.register_buffer("fitted", torch.tensor(False))

    def forward(self, vectors_bD: Tensor) -> Tensor:
        """Returns B v of each vector, float32 `[b, D_s]`."""
        with in_float32(vectors_bD):
            return vectors_bD.float() @ self.basis.T

    def fit(self, vectors_nD: Tensor) -> None:
        """Computes the directions of some vectors, float32 `[n, D_t]`, once."""
        self.basis.copy_(directions(vectors_nD, len(self.basis)))
        self.fitted.fill_(True)


class Projected(Loss):
    """The teacher's vectors through a projection, for students with narrower ones."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True
    TAKES_VECTORS: ClassVar[bool] = True
    VECTORS_ALONE: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True

    name: Literal["projected"] = "projected"
    """The teacher's vectors through a projection, for students with narrower vectors."""
    projection: Literal["pca", "learned"] = "pca"
    """pca: the student learns the teacher's vectors in the directions in which those differ most; learned: a layer that is trained along
    widens the student's vectors to the teacher's."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The vectors of both models.

        Raises:
            InputError: The student's vectors are no narrower than the teacher's.
        """
        ours, theirs = setting.student.classes, setting.teacher.classes
        if ours >= theirs:
            raise InputError(
                f"{setting.key}: projected given; the vectors of the student have {ours} numbers, the teacher's {theirs}: give soft_target"
            )
        return Wanted(logits=True), Wanted(logits=True)

    def build(self, setting: Setting) -> nn.Module:
        """Returns the directions, or the layer that is trained."""
        ours, theirs = setting.student.classes, setting.teacher.classes
        return Directions(ours, theirs) if self.projection == "pca" else nn.Linear(ours, theirs, bias=False)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `projected`."""
        student, teacher = inputs.student.logits, inputs.teacher.logits
        if isinstance(trained, Directions):
            if not trained.fitted:
                trained.fit(teacher_vectors(inputs.pair).to(student.device))
            return {"projected": distance(student, trained(teacher))}
        assert trained is not None, "build returned a layer"
        with in_float32(student):
            widened = trained(student.float())
        return {"projected": distance(widened, teacher)}


def distance(one_bD: Tensor, other_bD: Tensor) -> Tensor:
    """Returns 2 - 2 cos of each pair of vectors, float32 `[b]`; of a vector of zeros it is 1."""
    with in_float32(one_bD):
        ours, theirs = (functional.normalize(vectors.float(), dim=1) for vectors in (one_bD, other_bD))
        return (ours - theirs).square().sum(dim=1)


def directions(vectors_nD: Tensor, count: int) -> Tensor:
    """Returns the `count` directions in which vectors differ most, the first one first, float32 `[count, D]`, orthonormal.

    Args:
        vectors_nD: Vectors, float32.
        count: How many, at most D. Beyond the rank of the centred vectors any orthonormal directions follow.
    """
    centred = vectors_nD.double() - vectors_nD.double().mean(dim=0)
    covariance_DD = centred.T @ centred  # of as many rows as there are it takes no more than D^2
    _, found_DD = torch.linalg.eigh(covariance_DD)
    basis = found_DD.flip(1)[:, :count].T
    largest = basis.gather(1, basis.abs().argmax(dim=1, keepdim=True))
    signed: Tensor = (basis * largest.sign()).float()
    return signed


@torch.no_grad()
def teacher_vectors(pair: Pair) -> Tensor:
    """Returns the teacher's vectors of training rows, evenly spread, float32 `[n, D_t]`."""
    teacher, total = pair.teacher, len(pair.rows.by_length.order)
    count = min(total, MOST_ROWS)
    chosen = np.arange(count) * total // count
    if teacher.logits is not None:
        return teacher.logits[torch.from_numpy(chosen)].float()
    parts = []
    for start in range(0, count, BATCH_SIZE):
        features = on_device(teacher.rows.batch(chosen[start : start + BATCH_SIZE]), device_of(teacher.capture.model))
        parts.append(teacher.capture(features, Wanted(logits=True)).logits.float().cpu())
    return torch.cat(parts)
