"""Several teachers: averages their softened probabilities.

You et al. 2017, https://doi.org/10.1145/3097983.3098135, section 3.1:

    p_i = softmax(z_i / T),   p = sum_i w_i p_i,   z = T log p        sum_i w_i = 1, equal weights by default
    regression                z = sum_i w_i z_i

T is the temperature of the losses, so the soft targets of z are exactly p, and the gradient is the gradient of the mean divergence from all
teachers. z replaces the logits of a single teacher in every loss that uses only logits. On the selection split, agreement is measured with
p at T = 1. Not supported: the paper's triplets of hidden states; losses that use hidden states or attention take one teacher.

Tensor names carry their shapes: b rows, C classes. For text generation z is [b, L, V].
"""

from __future__ import annotations

from collections.abc import Sequence

from foundation.training.distillation.capture import Captured, Wanted
from foundation.training.distillation.teacher import Targets, Teacher
from foundation.training.losses.answer_loss import AnswerLoss
from foundation.training.train import Batch


def run_teachers(
    teachers: Sequence[Teacher | Targets], weights: Sequence[float], batch: Batch, wanted: Wanted, temperature: float, losses: AnswerLoss
) -> Captured:
    """Returns the captured states of one teacher, or the averaged logits of several; no gradient flows into them.

    Args:
        teachers: One, or several if only logits are wanted.
        weights: Weight of each teacher; they add up to 1.
        batch: Rows.
        wanted: What to capture.
        temperature: T > 0.
        losses: The losses of the task.
    """
    captured = [teacher(batch, wanted) for teacher in teachers]
    if len(captured) == 1 or wanted == Wanted():
        return captured[0]
    assert not wanted.internals, "losses that use hidden states or attention take one teacher"
    return Captured(losses.averaged([each.logits for each in captured], weights, temperature))


def shares(weights: Sequence[float], count: int) -> tuple[float, ...]:
    """Returns the weights of `count` teachers, normalized to add up to 1; equal weights if none are given."""
    given = weights or [1.0] * count
    return tuple(weight / sum(given) for weight in given)
