"""The directions in which a teacher's vectors differ most, for `foundation.training.losses.distillation.projected`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from foundation.models.forward import device_of, on_device
from foundation.training.distillation.capture import Wanted
from foundation.training.distillation.teacher import Pair
from foundation.training.precision import in_float32

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
