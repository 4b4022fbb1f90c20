"""Losses of a kind of answer (`foundation.labels`): against labels, and its distance from a teacher.

Tensor names carry their shapes: b rows, C logits of a row. Every loss has one value for each row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from foundation.training.losses.divergence import divergence


class AnswerLoss(ABC):
    """The losses of one kind of answer.

    Those that are here are of answers chosen by a softmax, so that a subclass writes what differs.
    """

    name: str = "cross_entropy"
    """Name of the loss against labels."""

    def compares_rows(self) -> bool:
        """Whether the loss against labels compares rows that need not be in one micro-batch."""
        return False

    @abstractmethod
    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Returns the loss of each row against its labels, float32 `[b]`.

        Args:
            logits: Logits of the model, float32 `[b, ...]`.
            labels: Labels of the rows, as `foundation.data` makes them.
            label_smoothing: Share of the target probability that is spread over all choices (https://arxiv.org/abs/1512.00567).
        """

    def choices(self, logits: Tensor) -> Tensor:
        """Returns the logits of all choices that a row makes, `[b, C]`, or `[b, k, C]` for k choices; only for answers with
        probabilities."""
        return logits

    def over_choices(self, values: Tensor, labels: Tensor) -> Tensor:
        """Returns one value for each row, `[b]`, of the values of its choices, `[b]` or `[b, k]`."""
        return values

    def taught(self, logits: Tensor, target: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """Returns how far each row is from a teacher, float32 `[b]`: T^2 KL(softmax(target / T) || softmax(logits / T)) of its choices.

        Hinton et al. 2015, https://arxiv.org/abs/1503.02531, section 2.

        Args:
            logits: Logits of the student, float32 `[b, ...]`.
            target: Logits of the teacher, of the same shape.
            labels: Labels of the rows; only which positions count is read of them.
            temperature: T > 0.
        """
        return temperature**2 * self.over_choices(divergence(self.choices(logits), self.choices(target), temperature), labels)

    def mixed(self, logits: Tensor, first: Tensor, second: Tensor, share_b: Tensor) -> Tensor:
        """Returns the loss of mixtures of two rows, float32 `[b]`: cross entropy is linear in the target.

        Args:
            logits: Logits for the mixtures, float32 `[b, C]`.
            first: Labels of the rows whose share is `share_b`.
            second: Labels of the others.
            share_b: Shares, float32 `[b]`.
        """
        return share_b * self.labelled(logits, first) + (1 - share_b) * self.labelled(logits, second)

    def averaged(self, logits: Sequence[Tensor], weights: Sequence[float], temperature: float) -> Tensor:
        """Returns logits with averaged probabilities of several models, float32 `[..., C]` (`foundation.training.distillation.ensemble`).

        Args:
            logits: Logits of each model, float32 `[..., C]`.
            weights: Weight of each model; they add up to 1.
            temperature: T > 0.
        """
        logs = [math.log(weight) + torch.log_softmax(values / temperature, dim=-1) for weight, values in zip(weights, logits, strict=True)]
        return temperature * torch.stack(logs).logsumexp(dim=0)

    def drawn_gradient(self, logits: Tensor, labels: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """Returns the gradient of the loss by the logits for answers drawn from the model itself, like `logits`.

        Args:
            logits: Logits of the model, float32 `[b, ...]`.
            labels: Labels of the rows; only which positions count is read of them.
            temperature: Temperature of the softmax that answers are drawn from.
            generator: Draws the answers.
        """
        p_NC = torch.softmax(logits.flatten(0, -2) / temperature, dim=1)
        drawn_N1 = torch.multinomial(p_NC, 1, generator=generator)
        return p_NC.scatter_add(1, drawn_N1, torch.full_like(p_NC[:, :1], -1.0)).view_as(logits)


class SquaredLoss(AnswerLoss):
    """The losses of an answer without probabilities, whose distance from a teacher is a squared difference."""

    def averaged(self, logits: Sequence[Tensor], weights: Sequence[float], temperature: float) -> Tensor:
        """The weighted sum."""
        return torch.stack([weight * values for weight, values in zip(weights, logits, strict=True)]).sum(dim=0)

    def drawn_gradient(self, logits: Tensor, labels: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """Normal numbers: answers are drawn around the model's own."""
        return torch.randn(logits.shape, generator=generator, device=logits.device)
