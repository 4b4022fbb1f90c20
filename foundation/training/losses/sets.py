"""Losses of any number of labels: binary cross entropy, and the divergence of the probabilities that each label holds.

loss_b = mean_c -(y_bc log p_bc + (1 - y_bc) log(1 - p_bc))      p: sigmoid of the logits
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from foundation.training.losses.answer_loss import AnswerLoss


class SetLoss(AnswerLoss):
    """Logits `[b, C]`, labels bool `[b, C]`."""

    name = "binary_cross_entropy"

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean over the labels; smoothing moves each target toward one half."""
        target = labels.to(logits.dtype) * (1 - label_smoothing) + label_smoothing / 2
        return functional.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(dim=1)

    def choices(self, logits: Tensor) -> Tensor:
        """Each label holds or does not, `[b, C, 2]`."""
        return torch.stack([torch.zeros_like(logits), logits], dim=-1)

    def over_choices(self, values: Tensor, labels: Tensor) -> Tensor:
        """The mean over the labels."""
        return values.mean(dim=1)

    def averaged(self, logits: Sequence[Tensor], weights: Sequence[float], temperature: float) -> Tensor:
        """The logits of the averaged probabilities that each label holds."""
        pairs = list(zip(logits, weights, strict=True))
        yes, no = (
            torch.stack([math.log(weight) + functional.logsigmoid(sign * values / temperature) for values, weight in pairs]).logsumexp(
                dim=0
            )
            for sign in (1, -1)
        )
        return temperature * (yes - no)

    def drawn_gradient(self, logits: Tensor, labels: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """Each label is drawn by itself."""
        p_bC = torch.sigmoid(logits / temperature)
        return p_bC - torch.bernoulli(p_bC, generator=generator)
