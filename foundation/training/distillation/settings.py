"""Settings of a training that learns from a teacher besides the labels: part of the recipe, read without torch."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_serializer, model_validator

from foundation.core.config import Config
from foundation.training.losses.distillation.presets import AnyLoss, LossName


class DistillationSettings(Config):
    """Losses of a model that learns from a teacher and from labels."""

    distill: bool = True
    """Learn from the teacher in addition to the labels."""
    loss: LossName | None = None
    """A published combination of losses of the stage `distill`, instead of `soft_weight`. Default: teacher logits and labels."""
    losses: tuple[AnyLoss, ...] = ()
    """Individual losses, as in the stage `distill`. Teacher layers are counted among those that the student still has."""
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """Softmax temperature of both models; unused for regression. Default: 2, or the published value with `loss`."""
    soft_weight: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Weight of the teacher logits in the loss; the labels have weight 1 - soft_weight. Unused with `loss` or `losses`."""
    hard_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the labels with `loss` or `losses`. Default: the published value with `loss`, 0 with `losses`."""

    @field_serializer("losses")
    def _losses_as_set(self, losses: tuple[AnyLoss, ...]) -> list[dict[str, object]]:
        # cache keys hold what the recipe says of a loss: a setting that a loss gets later changes none
        return [{"name": loss.name, **loss.model_dump(mode="json", exclude_unset=True)} for loss in losses]

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
