"""The Kullback-Leibler divergence from a teacher's probabilities, with little memory: logits of a language model are the largest tensors.

    p = softmax(y / T),  q = softmax(z / T)          y: logits of the teacher, z: of the student
    KL(p || q) = sum_c p_c (log p_c - log q_c)       d KL / dz = (q - p) / T

Written in operations of autograd, five tensors as large as the logits are kept or made at one time: both logarithms, p, and the terms of
the sum. Here only the logits are stored, and the rest is computed twice, for a piece of the choices at a time. Values and gradients have
the bits that autograd computes, because each choice is summed for itself.

Tensor names carry their shapes: C logits of a choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MOST = 2**24
"""Logits that are worked on at a time: 64 MiB for each tensor."""


def divergence(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Returns KL(softmax(target / T) || softmax(logits / T)) of each choice, float32 `[...]`.

    Args:
        logits: Logits of the student, float32 `[..., C]`.
        target: Logits of the teacher, of the same shape, without a gradient.
        temperature: T > 0.
    """
    assert not target.requires_grad, "a teacher does not learn"
    found: Tensor = _Divergence.apply(logits, target, temperature)  # type: ignore[no-untyped-call]
    return found


class _Divergence(torch.autograd.Function):
    """The divergence and its gradient, piece by piece."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, temperature: float) -> Tensor:
        """Returns the divergence of each choice; the arguments are as for `divergence`."""
        ctx.save_for_backward(logits, target)
        ctx.temperature = temperature
        found = logits.new_empty(logits.shape[:-1])
        for piece in _pieces(logits.shape):
            ours, theirs = (torch.log_softmax(values[piece] / temperature, dim=-1) for values in (logits, target))
            found[piece] = functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=-1)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of the student's logits."""
        logits, target = ctx.saved_tensors
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for piece in _pieces(logits.shape):
            ours, theirs = (torch.log_softmax(values[piece] / ctx.temperature, dim=-1) for values in (logits, target))
            of_ours = -(gradient[piece][..., None] * theirs.exp_())
            found[piece] = torch.ops.aten._log_softmax_backward_data(of_ours, ours, -1, ours.dtype).div_(ctx.temperature)
        return found, None, None


def _pieces(shape: Sequence[int]) -> Iterator[tuple[int | slice, ...]]:
    """Yields the index of each piece of logits of a shape `[..., C]`: up to `MOST` of them, and at least one choice."""
    rest = math.prod(shape[1:])
    if rest > MOST and len(shape) > 2:
        yield from ((row, *piece) for row in range(shape[0]) for piece in _pieces(shape[1:]))
        return
    many = max(1, MOST // max(1, rest))
    yield from ((slice(start, start + many),) for start in range(0, shape[0], many))
