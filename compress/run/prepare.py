"""Preparation of a run: loads the data, checks the model against all stages, and resolves their teachers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from compress.reading.certified import with_certify
from compress.reading.load import load_data
from compress.recipe import Recipe
from compress.run.inputs import check_inputs, check_teacher
from compress.run.lengths import in_samples
from compress.run.timer import Timer
from export.cascade.cascade import Cascade
from export.engines.registry import absent, runs_here
from export.export import Export
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.run_folder import PROFILES
from foundation.core.errors import InputError, Problem
from foundation.core.progress import ConsoleProgress
from foundation.core.step_names import BASELINE, INPUT
from foundation.core.target import Target
from foundation.data.splits import Data, Judge
from foundation.labels.tasks import num_classes
from foundation.machine import environment
from foundation.machine.parallel import ALONE, Team
from foundation.measure.judged import judged_of, num_predictions, problem_with
from foundation.models.adapters import model_folder
from foundation.models.config import ModelConfig, label_names
from foundation.models.files import find
from foundation.models.importing import check_model, source_digest
from foundation.models.inputs.saving import tokenizer_folder
from foundation.models.inputs.tokenizer import TrainedTokenizer, resolve_tokenizer
from foundation.models.library import preview, with_class
from foundation.models.size import count
from foundation.stage.context import Context
from foundation.stage.stage import Stage, input_named, is_model, teachers_named
from foundation.training.distillation.teacher import FITTING, about
from quantize.quantize import Quantize

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from export.engines.spec import EngineSpec
    from foundation.artifacts.exported import Build, Engine


def prepare(recipe: Recipe, folder: Path, progress: ConsoleProgress, team: Team = ALONE, judge: Judge = "evaluation") -> Context:
    """Loads the data and returns the context of the first step; its `count_macs` checks the model without reading weights."""
    in_samples(recipe)  # before the data, which may take long to load
    if problem := problem_with(recipe.model.task, recipe.goals.metric):
        raise InputError.of([problem])
    names = label_names(recipe.model)
    data = load_data(recipe.data, recipe.model.task, names, progress.log, recipe.tokenizer or recipe.model.path)
    data = with_certify(data, recipe.data, recipe.model.task, progress.log, numbered=names is not None)
    return context_of(recipe, data.judged_on(judge), folder, progress, team)


def context_of(recipe: Recipe, data: Data, folder: Path, progress: ConsoleProgress, team: Team = ALONE) -> Context:
    """Returns the context of the first step on data that is loaded already; see `prepare`."""
    recipe = in_samples(recipe)
    judged_of(recipe.model.task, recipe.goals.metric, data.labels)  # checks the class that it names
    context = Context(
        task=recipe.model.task,
        data=data,
        max_length=recipe.data.max_length,
        stride=recipe.data.shared_tokens if recipe.model.facts.finds_spans or recipe.data.windows is not None else 0,
        aggregate="" if recipe.data.windows is None else recipe.data.windows.aggregate,
        target=recipe.target,
        seed=recipe.seed,
        progress=progress,
        goals=recipe.goals,
        scratch=folder / "stages" / ".scratch",
        shared=folder / "stages",
        team=team,
        parallel=recipe.parallel,
        profiles=folder / PROFILES if recipe.profile else None,
        fingerprint=environment.fingerprint(),
    )
    return replace(
        context,
        count_macs=cache(partial(_check_model, recipe, context)),
        measure_latency=_timer(recipe, context),
        engine_job=partial(_engine_job, recipe.target),
    )


def _engine_job(target: Target, root: Path, build: Build, engine: Engine, proposals: bool) -> EngineSpec:
    """Returns the spec of an engine of export.json, with what proposes tokens to it where that is asked for."""
    from export.engines.spec import proposed_to, spec_of

    spec = spec_of(root, build, engine, target)
    return proposed_to(spec, root, engine) if proposals and engine.speculation is not None else spec


def _timer(recipe: Recipe, context: Context) -> Timer:
    """Returns a timer that quantizes and exports as this recipe does."""
    quantizer = next((stage for stage in recipe.stages if isinstance(stage, Quantize)), Quantize())
    exporter = next((stage for stage in recipe.stages if isinstance(stage, Export)), Export())
    return Timer(context, quantizer, exporter)


def _check_model(recipe: Recipe, context: Context) -> int:
    """Checks the model against data, recipe and stages; returns its multiply-accumulates for one row."""
    tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
    config = check_model(recipe.model, num_classes(context.task, context.data.labels), context.max_length, tokenizer).config
    problems: list[Problem] = []
    for check in (partial(noted, recipe, config, context), partial(_check_stages, recipe, config, context)):
        try:
            check()
        except InputError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise InputError.of(problems)
    return count(config, context.task, context.max_length).macs


def noted(recipe: Recipe, config: PreTrainedConfig, context: Context) -> tuple[str, ...]:
    """Returns the notes about the tokenizer that the import of a recipe's model will log, about its chat template, and about products that
    this processor does not compute exactly, one line each.

    Raises:
        InputError: Rows, conversations or questions cannot be prepared for the model.
    """
    tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
    doubts = (doubt for stage in recipe.stages if isinstance(stage, Quantize) for doubt in stage.doubts(context))
    notes = (*check_inputs(recipe.model, config, tokenizer, context), *doubts)
    if not recipe.model.facts.generates or config.is_encoder_decoder or isinstance(tokenizer, TrainedTokenizer):
        return notes
    return (*notes, *_check_conversations(recipe, config, tokenizer))


def questionable_goals(recipe: Recipe, data: Data) -> list[str]:
    """Returns one line for each goal that is allowed but probably not what was meant.

    Raises:
        InputError: The task has no metric that `goals.metric` names, or the data no such class.
    """
    found = recipe.goals.questions(num_predictions(recipe.model.task, recipe.goals.metric, data.evaluation.labels, data.labels))
    if recipe.goals.max_disagreement is not None and not any(isinstance(stage, Cascade) for stage in recipe.stages):
        remedy = "add a cascade, or leave the goal out (max_drop limits lost answers)"
        found.append(f"goals.max_disagreement: given without the stage cascade, which certifies it: it will not be judged; {remedy}")
    return found


def _check_conversations(recipe: Recipe, config: PreTrainedConfig, tokenizer: str | None) -> tuple[str, ...]:
    """Returns a note about the chat template of a decoder, after a check of the template and of the questions for its engines."""
    from export.generation.chats import check_chats, check_questions

    source = None if recipe.model.path is None else find(recipe.model.path, "model.path", weights=False)
    folder = tokenizer_folder(source, tokenizer)
    for stage in recipe.stages:
        if isinstance(stage, Export) and stage.generation.questions is not None:
            check_questions(folder, config, stage.generation)
    return check_chats(folder)


def _check_stages(recipe: Recipe, config: PreTrainedConfig, context: Context) -> None:
    """Runs each stage's checks of its input model and teacher, before anything runs."""
    _check_machine(recipe)
    for stage, given, teacher in checked_with(recipe, config, context):
        stage.check(given, teacher, replace(context, team=stage.team(context.team)))


def checked_with(
    recipe: Recipe, config: PreTrainedConfig, context: Context
) -> Iterator[tuple[Stage, PreTrainedConfig, PreTrainedConfig | None]]:
    """Yields every stage with the Transformers configs of its input model and of its first teacher (None without one).

    Args:
        recipe: The recipe.
        config: Transformers config of the model of the recipe.
        context: The context of the first step.
    """
    baseline = config
    configs: dict[str, PreTrainedConfig] = {}
    for stage in recipe.stages:
        config = {BASELINE: baseline, **configs}[named] if (named := input_named(stage)) else config
        known = {BASELINE: baseline, INPUT: config, **configs}
        teachers = [_config_outside(stage, name, context) if is_model(name) else known[name] for name in teachers_named(stage)]
        stage = stage.among(known, config)
        yield stage, config, teachers[0] if teachers else None
        config = configs[str(stage.id)] = with_class(stage.config_after(config), context.task)


def _check_machine(recipe: Recipe) -> None:
    """Checks that the engines that the run times and serves can run on this machine, and that there are lengths to choose buckets for.

    Raises:
        InputError: They cannot; without this check the run would fail only after training.
    """
    task, facts = recipe.model.task, recipe.model.facts
    if recipe.target.buckets is not None and (facts.modality != "text" or facts.generates):
        raise InputError("target.buckets", f"given for the task {task}", "it is for texts with classes or values", "leave it out")
    if any(isinstance(stage, Export) or getattr(stage, "measure", None) == "latency" for stage in recipe.stages):
        problems = absent(recipe.target)
        if problems:
            raise InputError.of(problems)
    server = next((stage.NAME for stage in recipe.stages if stage.PRODUCES == "model_repository"), None)
    if server is not None and not runs_here(recipe.target):
        given = ", ".join(recipe.target.engines)
        raise InputError("target.engines", f"{given} given, which cannot run here", f"{server} needs predictions", "add an engine that can")


def teachers_of(step: Stage, parent: Artifact | None, context: Context) -> tuple[Artifact, ...]:
    """Returns the checkpoints that the `teacher` key of a step names; empty for a step without that key."""
    return tuple(_teacher(name, step, parent, context) for name in teachers_named(step))


def _teacher(name: str, step: Stage, parent: Artifact | None, context: Context) -> Artifact:
    if is_model(name):
        with about(f"stages.{step.id}.teacher"):
            folder = model_folder(name, "model.path", None, weights=True)
            return Artifact(folder, {"id": name, "digest": source_digest(_outside(step, name, context))})
    if name == INPUT:
        assert parent is not None, "a stage with a teacher is not the first step"
        return parent
    return context.checkpoint(name)


def _outside(step: Stage, name: str, context: Context) -> ModelConfig:
    return ModelConfig(path=name, task=context.task, head=getattr(step, "teacher_head", "keep"))


def _config_outside(step: Stage, name: str, context: Context) -> PreTrainedConfig:
    """Returns the Transformers config of a teacher outside the run."""
    num_labels = num_classes(context.task, context.data.labels)
    key = f"stages.{step.id}.teacher"
    with about(key):
        checked = check_model(_outside(step, name, context), num_labels, context.max_length)
        check_teacher(checked.config, model_folder(name, "model.path", None, weights=False), context)
    if num_labels and checked.labels not in (None, context.data.labels):
        raise InputError(
            key, f"the teacher has the labels {preview(checked.labels or ())}, the data {preview(context.data.labels)}{FITTING}"
        )
    return checked.config
