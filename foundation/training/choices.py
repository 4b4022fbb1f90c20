"""Names that a recipe can choose for a training: its optimizer, and losses that labels alone do not determine.

Reading a recipe imports this file, and not what the names stand for: that needs torch.
"""

from __future__ import annotations

from typing import Literal

from foundation.core.config import Config

OrderLoss = Literal["listwise", "ranknet", "lambdarank", "pointwise"]
"""The loss of candidates that a model puts in order (`foundation.training.losses.candidates`)."""
PairLoss = Literal["cosine", "ranking", "triplet", "margin_mse"]
"""The loss of texts that come in pairs (`foundation.training.losses.vector`)."""
OptimizerName = Literal["adamw", "adamw8bit", "adafactor", "lamb", "lars"]


class Optimizer(Config):
    """The optimizer of a training."""

    name: OptimizerName = "adamw"
    """adamw: two moments for each weight; adamw8bit: the same in a quarter of the memory, with some rounding; adafactor: hardly any memory,
    with a learning rate of 1e-3 to 1e-2 that is relative to the weights; lamb: for batches of thousands of rows, with a learning rate of
    5e-4 to 5e-3 that grows with the root of the batch size; lars: momentum alone, with a learning rate that is relative to the
    weights too and grows with the batch size."""
