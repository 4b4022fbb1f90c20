"""Choices of the stage `quantize`: names of methods, the methods of each scheme, and the settings of its training.

Reading a recipe imports this file, and not the methods: those need torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from foundation.core.config import Config
from foundation.schemes.table import SCHEMES, Scheme
from foundation.training.distillation.settings import DistillationSettings
from foundation.training.few_parameters.lora import Lora
from foundation.training.settings import Epochs, LearningRate, TrainingSettings

Method = Literal["minmax", "moving_average", "percentile", "mse", "entropy"]
METHODS: tuple[Method, ...] = get_args(Method)
MomentRounding = Literal["nearest", "gptq", "adaround"]
"""How the weights of a layer are rounded on a given grid, by the moments of its inputs."""
Rounding = Literal["nearest", "gptq", "adaround", "autoround"]
"""How weights are rounded (`quantize.rounding.rounding`)."""
GroupRange = Literal["minmax", "weights", "outputs"]
"""What the range of a group of int4 weights is chosen by (`quantize.group_scales`)."""
Switch = bool | Literal["auto"]
"""Whether sites are int8 (`quantize.products`)."""
UNEQUAL_STEPS: tuple[Method, ...] = ("minmax", "moving_average", "percentile")
"""Calibrators that do not need equally spaced codes."""


def calibrators(scheme: Scheme) -> tuple[Method, ...]:
    """Returns the calibrators that a scheme can use; none where activations have no scale from calibration."""
    row = SCHEMES[scheme]
    return () if row.largest_activation is None else METHODS if row.equal_steps else UNEQUAL_STEPS


def default_calibrator(scheme: Scheme) -> Method:
    """Returns the calibrator for activations with large channels; after smoothing there is no tail left to clip: minmax."""
    return "percentile" if SCHEMES[scheme].equal_steps else "minmax"


Learned = Literal["lsq", "pact", "fixed"]


class Answers(Config):
    """Calibration rows that the model writes itself (`quantize.answers`)."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of `calibration.rows` that the model writes; the others are train rows."""
    questions: Annotated[str, Field(min_length=1)] | None = None
    """UTF-8 file with a question a line, which the model answers in its chat format up to its end token. Absent: the model continues the
    beginnings of train rows."""
    tokens: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Most tokens of an answer."""
    prompt: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of a row that is given to be continued; not used with questions."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Temperature of the sampling; 1: the distribution of the model."""


class Qat(TrainingSettings, DistillationSettings):
    """Settings of quantization-aware training."""

    epochs: Epochs = 1
    """Passes over the training rows; 0.5 is half a pass."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate: 1e-6 for an encoder that is close to float after calibration, up to its finetuning rate if much accuracy was
    lost."""
    scale_learning_rate: Annotated[float, Field(gt=0, le=10_000)] = 10
    """How many times faster scales learn than weights: a step changes a scale by about this times the learning rate, as a fraction."""
    scales: Learned = "lsq"
    """lsq: learn all scales from rounding and clipping errors; pact: learn input scales from clipping errors only; fixed: learn none."""
    soft_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of the soft targets in the loss; the labels get the rest. 1 trains only to reproduce the model before quantization. Unused
    with `loss` or `losses`."""
    dropout: bool = False
    """Whether to use dropout. Its noise is much larger than the rounding error that the training adapts to."""
    keep: Literal["best", "last"] = "best"
    """Which weights and scales to keep: the best on the selection split, including those before training, or the last. Best is closest to
    the teacher's logits if there is a teacher, else best by the metric."""
    lora: Lora | None = None
    """Trains low-rank changes of the quantized weights, and scales, instead of all weights; give {} for the defaults."""

    @model_validator(mode="after")
    def _no_dropout_within_rounding(self) -> Self:
        if self.lora is not None and self.lora.dropout:
            raise ValueError(f"lora.dropout: {self.lora.dropout:g} given; the change is part of the weight, which has none: leave it out")
        return self
