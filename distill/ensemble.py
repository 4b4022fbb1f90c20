"""Several teachers: their softened answers are averaged (You et al. 2017, https://doi.org/10.1145/3097983.3098135, section 3.1).

    p_i = softmax(z_i / T),   p = sum_i w_i p_i,   z = T log p        sum_i w_i = 1, equal weights unless they are given
    regression                z = sum_i w_i z_i

T is the temperature of the losses, so that soft targets of z are those of p: the gradient is that of the mean of the divergences to every
teacher. z takes the place of the one teacher's logits in every loss that compares answers alone. Agreement on the selection split is with
p at T = 1. Left out: the same paper's triplets of hidden states; losses that look inside of a teacher take one.

Tensor names carry their shapes: b rows, C classes; z of text-generation is [b, L, V].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compress.training.train import Batch
from distill.capture import Captured, Wanted
from distill.teacher import Teacher


def ask(
    teachers: Sequence[Teacher], weights: Sequence[float], batch: Batch, wanted: Wanted, temperature: float, regression: bool
) -> Captured:
    """Returns what one teacher says about a batch, or what several say together; no gradient flows into them.

    Args:
        teachers: One, or several of which nothing but logits is wanted.
        weights: One for each; they add up to 1.
        batch: Rows.
        wanted: What to look at.
        temperature: T > 0.
        regression: Whether the logits are values.
    """
    seen = [teacher(batch, wanted) for teacher in teachers]
    if len(seen) == 1 or wanted == Wanted():
        return seen[0]
    assert not wanted.inside, "losses that look inside of a teacher take one"
    return Captured(averaged([one.logits for one in seen], weights, temperature, regression))


def averaged(logits: Sequence[Tensor], weights: Sequence[float], temperature: float, regression: bool = False) -> Tensor:
    """Returns z, float32 of the shape of each of the logits.

    Args:
        logits: For each teacher float32 `[..., C]`.
        weights: One for each; they add up to 1.
        temperature: T > 0.
        regression: Whether the logits are values.
    """
    if regression:
        return torch.stack([weight * values for weight, values in zip(weights, logits, strict=True)]).sum(dim=0)
    logs = [math.log(weight) + torch.log_softmax(values / temperature, dim=-1) for weight, values in zip(weights, logits, strict=True)]
    return temperature * torch.stack(logs).logsumexp(dim=0)


def shares(weights: Sequence[float], count: int) -> tuple[float, ...]:
    """Returns the weights of `count` teachers, scaled to add up to 1; equal ones where none are given."""
    given = weights or [1.0] * count
    return tuple(weight / sum(given) for weight in given)
