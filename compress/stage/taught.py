"""What a stage that trains against a teacher learns from: the settings, the pair of models, and where they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from compress.core.config import Config

if TYPE_CHECKING:  # types only: importing torch takes a second
    from torch import nn

    from compress.models.origin import Origin
    from compress.standalone.preprocess import Preprocessor

LossName = Literal["soft_target", "distilbert", "minilm", "minilmv2", "pkd", "tinybert", "mixkd", "logit_standardization", "relational"]
"""Published combinations of losses: `distill.presets`."""


@dataclass(frozen=True)
class Asked:
    """Where losses are asked for, by a stage that learns from a teacher."""

    stage: str
    """Id of the stage."""
    key: str
    """Key path of the settings."""
    teacher_key: str
    """That of the teacher."""


class Taught(Config):
    """What a model learns from."""

    distill: bool = True
    """Learn from the teacher too, and not from the labels alone."""
    loss: LossName | None = None
    """A published combination of losses of the stage `distill`, in place of `soft_weight`; absent: the teacher's answers and the labels."""
    losses: tuple[dict[str, JsonValue], ...] = ()
    """Such losses one by one, as in the stage `distill`. Layers of the teacher count among those that are left of it."""
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """Softens the answers of both models; unused for regression. Absent: 2, or as published with `loss`."""
    soft_weight: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of the teacher's answers in the loss; the labels have the rest. Unused with `loss` or `losses`."""
    hard_weight: Annotated[float, Field(ge=0)] | None = None
    """With `loss` or `losses`: weight of the labels; absent: as published with `loss`, 0 with `losses`."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        named = "loss" if self.loss is not None else "losses" if self.losses else ""
        usual = type(self).model_fields["soft_weight"].default
        if self.loss is not None and self.losses:
            raise ValueError("give either loss (a published combination) or losses (a list), not both")
        if named and not self.distill:
            raise ValueError(f"{named}: given with distill: false; leave one of them out")
        if named and self.soft_weight != usual:
            raise ValueError(f"soft_weight: {self.soft_weight:g} given beside {named}; give hard_weight, or leave it out")
        if self.hard_weight is not None and not named:
            raise ValueError(f"hard_weight: {self.hard_weight:g} given; it goes with loss or losses: give soft_weight")
        return self

    @property
    def named(self) -> bool:
        """Whether losses are asked for by name."""
        return self.loss is not None or bool(self.losses)


@dataclass(frozen=True)
class Learner:
    """A model that is trained against a teacher."""

    settings: Taught
    """What it learns from."""
    asked: Asked
    """Where that is asked for."""
    model: nn.Module
    """On its device."""
    source: Path
    """Checkpoint with its tokenizer or image processor."""
    prepared: Preprocessor
    """How it takes its rows."""
    teacher: nn.Module
    """On the same device."""
    theirs: Preprocessor
    """How the teacher takes its rows."""
    origin: Origin | None
    """Where the parts of the model come from, if it is made of parts of the teacher."""
