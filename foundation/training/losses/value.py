"""Losses of a number: the squared difference, from a label as from a teacher."""

from __future__ import annotations

from torch import Tensor

from foundation.training.losses.answer_loss import SquaredLoss


class ValueLoss(SquaredLoss):
    """Logits `[b, 1]`, values float32 `[b]`."""

    name = "squared_error"

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """(z - y)^2."""
        return (logits[:, 0] - labels).square()

    def taught(self, logits: Tensor, target: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """(z - t)^2."""
        return (logits - target).square().sum(dim=1)

    def mixed(self, logits: Tensor, first: Tensor, second: Tensor, share_b: Tensor) -> Tensor:
        """The squared difference from the mixed values."""
        return self.labelled(logits, share_b * first + (1 - share_b) * second)
