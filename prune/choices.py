"""What a recipe can choose in the stages `prune` and `sparsify`, apart from their methods: read without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from foundation.core.config import Config, as_given
from foundation.stage.distillation import DistillationSettings
from foundation.training.choices import Optimizer
from foundation.training.lora import Lora

Granularity = Literal["heads", "ffn", "hidden", "layers", "vocabulary", "experts"]
"""What a model is cut in."""
Groups = Literal["rows", "columns", "both"]
"""Which rows and columns of a block are groups of weights (`prune.sparsify.lasso`)."""


class Learn(Config):
    """Training of the masks of joint and movement; `recover` defines the loss."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = 2
    """Passes over the train split; 0.5 is half a pass."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-5
    """Peak learning rate of the weights."""
    mask_learning_rate: Annotated[float, Field(gt=0, le=100)] | None = None
    """Learning rate of the masks; absent: 0.01, or more in short trainings, so that a mask can open and close four times."""
    warmup: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of the steps over which the sparsity rises to its target: linearly for joint, cubically for movement."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 32
    """Rows per step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows in memory at once, if a whole batch does not fit."""


class Recover(DistillationSettings):
    """Fine-tuning of the pruned model."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = 1
    """Passes over the train split, divided evenly between the iterations; 0.5 is half a pass."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-5
    """Peak learning rate of every iteration."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 32
    """Rows per step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows in memory at once, if a whole batch does not fit."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the steps over which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls to 0 after the warm-up; constant: it does not fall."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Decoupled weight decay of matrices; not applied to biases and norms."""
    hidden_weight: Annotated[float, Field(ge=0)] = 0.0
    """Without `loss` and `losses`: weight of the loss on the teacher's hidden states; 0: none. The teacher must have the layers and
    channels of the incoming model."""
    evaluate_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on the selection split; absent: once per epoch."""
    keep: Literal["best", "last"] = "best"
    """Weights to keep: the best on the selection split, or the last."""
    optimizer: Optimizer = Optimizer()
    """The optimizer; learning rates are not the same for all."""
    lora: Lora | None = None
    """Trains low-rank adapters instead of all weights, and adds them to the weights at the end; give {} for the defaults."""

    @model_serializer(mode="wrap")
    def _as_given(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what was not asked for, so that runs without it keep their cache keys."""
        return as_given(self, whole, ("optimizer",))

    @model_validator(mode="after")
    def _hidden_by_name(self) -> Self:
        if self.hidden_weight and self.named:
            raise ValueError(f"hidden_weight: {self.hidden_weight:g} given beside loss or losses; give losses: [{{name: hidden}}]")
        return self
