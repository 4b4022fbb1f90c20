"""Choices of the stages `prune` and `sparsify`, apart from their methods: read without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from foundation.core.config import Config
from foundation.training.distillation.settings import DistillationSettings
from foundation.training.settings import Epochs, LearningRate, Passes, TrainingSettings

Granularity = Literal["heads", "ffn", "hidden", "width", "layers", "vocabulary", "experts"]
"""Units that are pruned."""
Groups = Literal["rows", "columns", "both"]
"""Which rows and columns of a block are groups of weights (`prune.sparsify.lasso`)."""


class Member(Config):
    """Place of a stage in a family of models, which share one schedule: `prune: {family: [...]}` expands to stages that have it."""

    number: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of this member, from 1: its training starts where the training of the previous one ended in the train split."""
    count: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of members."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.number > self.count:
            raise ValueError(f"number: {self.number} given; there are {self.count} members (count): give 1 to {self.count}")
        return self


class Learn(Passes):
    """Training of the masks of joint and movement; `recover` defines the loss."""

    epochs: Epochs = 2
    """Passes over the training rows; 0.5 is half a pass."""
    learning_rate: LearningRate = 3e-5
    """Peak learning rate of the weights."""
    mask_learning_rate: Annotated[float, Field(gt=0, le=100)] | None = None
    """Learning rate of the masks; absent: 0.01, or more in short trainings, so that a mask can open and close four times."""
    warmup: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of the steps over which the sparsity rises to its target: linearly for joint, cubically for movement."""


class Recover(TrainingSettings, DistillationSettings):
    """Fine-tuning of the pruned model."""

    epochs: Epochs = 1
    """Passes over the train split, divided evenly between the iterations; 0.5 is half a pass."""
    learning_rate: LearningRate = 3e-5
    """Peak learning rate of every iteration."""
    hidden_weight: Annotated[float, Field(ge=0)] = 0.0
    """Without `loss` and `losses`: weight of the loss on the teacher's hidden states; 0: none. The teacher must have the layers and
    channels of the incoming model."""

    @model_validator(mode="after")
    def _hidden_by_name(self) -> Self:
        if self.hidden_weight and self.named:
            raise ValueError(f"hidden_weight: {self.hidden_weight:g} given together with loss or losses; give losses: [{{name: hidden}}]")
        return self
