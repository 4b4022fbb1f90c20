"""Losses of one label out of several: cross entropy, and the divergence of the probabilities.

loss_b = (1 - e) * -log p_b[y_b] + e * mean_c -log p_b[c]      p: softmax of the logits, e: label smoothing
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from foundation.training.losses.answer_loss import AnswerLoss


class ClassLoss(AnswerLoss):
    """Logits `[b, C]`, class ids int64 `[b]`."""

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross entropy."""
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
