"""What has to be there before the first step: the data, a model that fits all stages, and the teachers that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from compress.artifacts.artifact import Artifact
from compress.core.errors import InputError
from compress.core.progress import ConsoleProgress
from compress.core.tasks import num_classes
from compress.data.load import load_data
from compress.machine import environment
from compress.machine.parallel import ALONE, Team
from compress.models.config import ModelConfig, label_names
from compress.models.files import find
from compress.models.importing import check_model, source_digest
from compress.models.library import some
from compress.models.size import count
from compress.models.tokenizer import resolve_tokenizer
from compress.recipe import Recipe
from compress.run.timer import Timer
from compress.stage.context import Context
from compress.stage.stage import Stage, input_named, is_model, teachers_named
from distill.injected import Injected
from distill.teacher import FITTING, about
from export.export import Export
from quantize.quantize import Quantize


def prepare(recipe: Recipe, folder: Path, progress: ConsoleProgress, team: Team = ALONE) -> Context:
    """Reads the data and returns the context that the first step sees; its `count_macs` checks the model, without reading weights."""
    data = load_data(recipe.data, recipe.model.task, label_names(recipe.model), progress.log, recipe.tokenizer or recipe.model.path)
    context = Context(
        task=recipe.model.task,
        data=data,
        max_length=recipe.data.max_length,
        target=recipe.target,
        seed=recipe.seed,
        progress=progress,
        max_drop=recipe.goals.max_drop,
        scratch=folder / "stages" / ".scratch",
        losses=Injected(),
        team=team,
        fingerprint=environment.fingerprint(),
    )
    return replace(context, count_macs=cache(partial(_check_model, recipe, context)), measure_latency=_timer(recipe, context))


def _timer(recipe: Recipe, context: Context) -> Timer:
    """Returns how checkpoints are timed in a run of this recipe: as it quantizes and exports."""
    quantizer = next((stage for stage in recipe.stages if isinstance(stage, Quantize)), Quantize())
    exporter = next((stage for stage in recipe.stages if isinstance(stage, Export)), Export())
    return Timer(context, quantizer, exporter)


def _check_model(recipe: Recipe, context: Context) -> int:
    """Checks the model against data, recipe and stages, and returns its multiply-accumulates for one row."""
    tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
    config = check_model(recipe.model, num_classes(context.task, context.data.labels), context.max_length, tokenizer).config
    _check_stages(recipe, config, context)
    return count(config, context.task, context.max_length).macs


def _check_stages(recipe: Recipe, config: Any, context: Context) -> None:
    """Lets every stage look at the model that it is going to get, and at its teacher, before anything is run."""
    baseline = config
    configs: dict[str, Any] = {}
    for stage in recipe.stages:
        config = {"baseline": baseline, **configs}[named] if (named := input_named(stage)) else config
        known = {"baseline": baseline, "input": config, **configs}
        teachers = [_config_outside(stage, name, context) if is_model(name) else known[name] for name in teachers_named(stage)]
        stage.check(config, teachers[0] if teachers else None, context)
        config = configs[str(stage.id)] = stage.config_after(config)


def teachers_of(step: Stage, parent: Artifact | None, context: Context) -> tuple[Artifact, ...]:
    """Returns the checkpoints that the `teacher` of a step stands for; none where the step has no such key."""
    return tuple(_teacher(name, step, parent, context) for name in teachers_named(step))


def _teacher(name: str, step: Stage, parent: Artifact | None, context: Context) -> Artifact:
    if is_model(name):
        with about(f"stages.{step.id}.teacher"):
            folder = find(name, "model.path")
            return Artifact(folder, {"id": name, "digest": source_digest(_outside(step, name, context))})
    if name == "input":
        assert parent is not None, "a stage with a teacher is not the first step"
        return parent
    return checkpoint_named(name, context.checkpoints)


def checkpoint_named(name: str, checkpoints: Mapping[str, Artifact]) -> Artifact:
    """Returns the checkpoint that a recipe calls `baseline`, or by the id of its stage; the first of them is the baseline."""
    return next(iter(checkpoints.values())) if name == "baseline" else checkpoints[name]


def _outside(step: Stage, name: str, context: Context) -> ModelConfig:
    return ModelConfig(path=name, task=context.task, head=getattr(step, "teacher_head", "keep"))


def _config_outside(step: Any, name: str, context: Context) -> Any:
    """Returns the Transformers config of a teacher that is not of this run."""
    num_labels = num_classes(context.task, context.data.labels)
    key = f"stages.{step.id}.teacher"
    with about(key):
        checked = check_model(_outside(step, name, context), num_labels, context.max_length)
    if num_labels and checked.labels not in (None, context.data.labels):
        raise InputError(f"{key}: its labels are {some(checked.labels or ())}, those of the data {some(context.data.labels)}{FITTING}")
    return checked.config
