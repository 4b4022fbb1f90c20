"""Losses of a span: cross entropy and the divergence of the probabilities of its first and its last token.

loss_b = (-log softmax(s_b)[y_b] - log softmax(e_b)[z_b]) / 2       s, e: logits of all tokens of window b, that the span starts, ends there

y and z are the first token if the window does not hold the answer. Logits of padding are very low
(`foundation.models.heads.reader`), so that its probability is 0 in every softmax; label smoothing leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foundation.models.heads.reader import PADDING_LOGIT
from foundation.training.losses.answer_loss import AnswerLoss


class SpanLoss(AnswerLoss):
    """Logits `[b, L, 2]` of all tokens, labels int32 `[b, 1 + G, W, 2]`."""

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross entropy of start and end."""
        logits_b2L = self.choices(logits)
        logs_b2L = torch.log_softmax(logits_b2L, dim=2)
        losses_b2 = -logs_b2L.gather(2, labels[:, 0, 0].long()[..., None])[..., 0]
        if label_smoothing:
            real_b2L = logits_b2L > PADDING_LOGIT / 2
            spread_b2 = -logs_b2L.where(real_b2L, 0.0).sum(dim=2) / real_b2L.sum(dim=2)
            losses_b2 = (1 - label_smoothing) * losses_b2 + label_smoothing * spread_b2
        return losses_b2.mean(dim=1)

    def choices(self, logits: Tensor) -> Tensor:
        """The token that starts and the one that ends the span, `[b, 2, L]`."""
        return logits.transpose(1, 2)

    def over_choices(self, values: Tensor, labels: Tensor) -> Tensor:
        """The mean of start and end."""
        return values.mean(dim=1)

    def averaged(self, logits: Sequence[Tensor], weights: Sequence[float], temperature: float) -> Tensor:
        """The logits of the averaged probabilities of each side."""
        return super().averaged([self.choices(values) for values in logits], weights, temperature).transpose(1, 2)

    def drawn_gradient(self, logits: Tensor, labels: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """A start and an end are drawn for each window."""
        return super().drawn_gradient(self.choices(logits), labels, temperature, generator).transpose(1, 2)
