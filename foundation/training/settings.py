"""The settings that every training has: part of the recipe, read without torch.

A stage that trains inherits them, or has a section that does. It declares a setting again only where its default or its meaning differs.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from foundation.core.config import Config
from foundation.training.choices import Optimizer
from foundation.training.few_parameters.lora import Lora

Epochs = Annotated[float, Field(gt=0, le=1000)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
RowsInMemory = Annotated[int, Field(ge=1)] | None


class Passes(Config):
    """How long a training is, and how large its steps are."""

    epochs: Epochs = 3
    """Passes over the training rows; 0.5 is half a pass."""
    learning_rate: LearningRate = 3e-5
    """Peak learning rate."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 32
    """Rows per step."""
    micro_batch_size: RowsInMemory = None
    """Rows in memory at once, if a whole batch does not fit; changes the result only by rounding and dropout."""


class TrainingSettings(Passes):
    """Settings of a training."""

    LATER: ClassVar[tuple[str, ...]] = ("optimizer",)

    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the steps over which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate decays to 0 after the warm-up; constant: no decay."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Decoupled weight decay of matrices; none for biases, norms and scales."""
    evaluate_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on the selection split; absent: once per epoch."""
    keep: Literal["best", "last"] = "best"
    """Which weights to keep: the best on the selection split, or the last."""
    optimizer: Optimizer = Optimizer()
    """The optimizer; learning rates are not the same for all."""
    lora: Lora | None = None
    """Trains low-rank adapters instead of all weights, and adds them to the weights at the end; give {} for the defaults."""
