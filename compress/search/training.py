"""Which stages of a recipe train, and the same recipe with less training or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from compress.recipe import Recipe
from compress.search.setup import Setup
from distill.distill import Distill
from foundation.stage.stage import Stage
from foundation.training.finetune import Finetune
from prune.methods import is_learned
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize

EPOCHS = "epochs"
Training = Literal["none", "optional", "needed"]


def training_of(stage: Stage) -> Training:
    """Returns whether a stage trains; optional: it can make its model without, such as pruning without recovery."""
    if isinstance(stage, Finetune | Distill):
        return "needed"
    if isinstance(stage, Prune):
        return "needed" if is_learned(stage.method) else "none" if stage.recover is None else "optional"
    if isinstance(stage, Sparsify):
        return "needed" if stage.learns else "none" if stage.recover is None else "optional"
    if isinstance(stage, Quantize):
        return "none" if stage.mode == "ptq" else "optional"
    return "none"


def training_in(setup: Setup, recipe: Recipe) -> set[Training]:
    """Returns the training settings of the stages that a candidate does not share with all others."""
    return {training_of(stage) for stage in recipe.stages[len(setup.shared) :]}


def untrained(setup: Setup, recipe: Recipe) -> Recipe:
    """Returns the recipe of a candidate without training where that is optional, up to its last model: no engine is built."""
    return _changed(setup, recipe, _without_training)


def shortened(setup: Setup, recipe: Recipe, share: float) -> Recipe:
    """Returns the recipe of a candidate with this share of the epochs, up to its last model: no engine is built."""
    return _changed(setup, recipe, lambda stage: scaled(stage, share))


def _changed(setup: Setup, recipe: Recipe, change: Callable[[Stage], Stage]) -> Recipe:
    first = len(setup.shared)
    models = [stage for stage in recipe.stages[first:] if stage.PRODUCES == "checkpoint"]
    return recipe.model_copy(update={"stages": (*recipe.stages[:first], *map(change, models))})


def _without_training(stage: Stage) -> Stage:
    settings = stage.model_dump(mode="json")
    if isinstance(stage, Quantize):
        return type(stage).model_validate({**settings, "mode": "ptq", "teacher": "input"})
    return type(stage).model_validate({**settings, "recover": None}) if training_of(stage) == "optional" else stage


def scaled(stage: Stage, share: float) -> Stage:
    """Returns a stage with this share of every number of epochs in its settings."""
    return type(stage).model_validate(_scaled(stage.model_dump(mode="json"), share))


def _scaled(value: object, share: float) -> object:
    if isinstance(value, dict):
        return {key: share * inner if _is_epochs(key, inner) else _scaled(inner, share) for key, inner in value.items()}
    return [_scaled(inner, share) for inner in value] if isinstance(value, list) else value


def _is_epochs(key: str, value: object) -> bool:
    return key == EPOCHS and isinstance(value, int | float) and not isinstance(value, bool)
