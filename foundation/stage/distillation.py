"""Training against a teacher: the settings that several stages share, and the pair of models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from foundation.core.config import Config

if TYPE_CHECKING:  # types only: importing torch takes a second
    from torch import nn

    from foundation.models.architecture.origin import Origin
    from foundation.standalone.preprocess import Preprocessor

LossName = Literal[
    "soft_target",
    "distilbert",
    "minilm",
    "minilmv2",
    "pkd",
    "tinybert",
    "mixkd",
    "logit_standardization",
    "relational",
    "similarity",
    "projected",
    "margin_mse",
]
"""Published combinations of losses; see `distill.presets`."""


@dataclass(frozen=True)
class SettingKeys:
    """Key paths of a stage that learns from a teacher, for messages."""

    stage: str
    """Id of the stage."""
    key: str
    """Key path of the distillation settings."""
    teacher_key: str
    """Key path of the teacher."""


class DistillationSettings(Config):
    """Losses of a model that learns from a teacher and from labels."""

    distill: bool = True
    """Learn from the teacher in addition to the labels."""
    loss: LossName | None = None
    """A published combination of losses of the stage `distill`, instead of `soft_weight`. Default: teacher logits and labels."""
    losses: tuple[dict[str, JsonValue], ...] = ()
    """Individual losses, as in the stage `distill`. Teacher layers are counted among those that the student still has."""
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """Softmax temperature of both models; unused for regression. Default: 2, or the published value with `loss`."""
    soft_weight: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Weight of the teacher logits in the loss; the labels have weight 1 - soft_weight. Unused with `loss` or `losses`."""
    hard_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the labels with `loss` or `losses`. Default: the published value with `loss`, 0 with `losses`."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        named = "loss" if self.loss is not None else "losses" if self.losses else ""
        usual = type(self).model_fields["soft_weight"].default
        if self.loss is not None and self.losses:
            raise ValueError("loss, losses: both given; give either loss (a published combination) or losses (a list)")
        if named and not self.distill:
            raise ValueError(f"{named}: given with distill: false; leave one of them out")
        if named and self.soft_weight != usual:
            raise ValueError(f"soft_weight: {self.soft_weight:g} given with {named}; give hard_weight instead, or leave it out")
        if self.hard_weight is not None and not named:
            raise ValueError(f"hard_weight: {self.hard_weight:g} given without loss or losses; give soft_weight instead")
        return self

    @property
    def named(self) -> bool:
        """Whether the losses are given by name."""
        return self.loss is not None or bool(self.losses)


@dataclass(frozen=True)
class Distillation:
    """A student, its teacher, and the losses."""

    settings: DistillationSettings
    """The losses."""
    keys: SettingKeys
    """Key paths of the settings, for messages."""
    model: nn.Module
    """The student, on its device."""
    source: Path
    """Checkpoint with the tokenizer or image processor of the student."""
    prepared: Preprocessor
    """Preprocessor of the student."""
    teacher: nn.Module
    """The teacher, on the same device."""
    theirs: Preprocessor
    """Preprocessor of the teacher."""
    origin: Origin | None
    """Maps the parts of the student to the teacher's, if it was cut from it; else None."""
    teacher_id: str | None = None
    """Digest of the teacher's artifact, if its logits for all rows are worth computing once, before the training; else None."""
