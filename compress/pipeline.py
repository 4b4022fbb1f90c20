"""The pipeline: a fold of stages over artifacts, with a cache.

    Recipe --> [stage.run(Artifact, Context, folder)]* --> Report

`run` is the whole of it: lock the run folder, read the data, put the implicit steps between the stages of the recipe (`plan_steps`), and
for every step either find the finished artifact under its cache key or make it. An artifact is found by the digest of everything that
went into it, and every byte of it is hashed again before it is used.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from compress import history
from compress.artifacts import artifact
from compress.artifacts.artifact import Artifact
from compress.artifacts.run_folder import link_repository, locked, open_run, sweep, write_lock
from compress.core.errors import InputError, nearest
from compress.core.progress import ConsoleProgress
from compress.core.tasks import num_classes
from compress.data.load import load_data
from compress.data.splits import Data
from compress.implicit import Evaluate, Latency, Source
from compress.machine import environment
from compress.machine.parallel import ALONE, Team
from compress.machine.process import keep_freed_memory
from compress.models.config import ModelConfig, label_names
from compress.models.files import find
from compress.models.importing import check_model, source_digest
from compress.models.library import some
from compress.models.size import count
from compress.models.tokenizer import settled
from compress.recipe import Recipe, check, dump
from compress.report import hops, report
from compress.stage.context import Context
from compress.stage.stage import Stage, input_named, is_model, teachers_named
from compress.timing import Timer
from compress.training.finetune import Finetune
from distill.injected import Injected
from distill.teacher import FITTING, about
from export.export import Export
from quantize.quantize import Quantize
from triton_repo.triton_repo import TritonRepo


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    folder: Path
    """The run folder; `report.html` and `report.json` lie in it."""
    report: Mapping[str, Any]
    """The contents of `report.json`."""

    @property
    def missed(self) -> list[str]:
        """The goals that were not met."""
        return [str(goal["goal"]) for goal in self.report["goals"] if goal["met"] is False]


def run(
    recipe: Recipe,
    out: Path | None = None,
    *,
    start: str | None = None,
    force: bool = False,
    again: str | None = None,
    progress: ConsoleProgress | None = None,
    team: Team = ALONE,
) -> Outcome:
    """Runs a recipe: every stage that is not finished yet, then the report.

    Args:
        recipe: A checked recipe.
        out: The run folder; `runs/<name>` where absent.
        start: Id of a stage: it and every later one are run again.
        force: Run every stage again.
        again: Id of one step to run again, and only that.
        progress: Where to tell; the terminal where absent.
        team: The processes that run it (`compress.machine.parallel.joined`); all of them call with the same arguments.

    Returns:
        The run folder and its report. A missed goal is no error: see `Outcome.missed`.

    Raises:
        InputError: The recipe, the model, the data or the machine is not fit for it.
    """
    folder, team = out or Path("runs") / recipe.name, replace(team, strategy=recipe.parallel.strategy)
    progress = (progress or ConsoleProgress()) if team.is_first else ConsoleProgress("silent")
    keep_freed_memory()
    steps = plan_steps(recipe)
    _check_start(start, steps)
    if recipe.target.device == "cpu":
        _check_server(steps)
    with locked(folder) if team.is_first else nullcontext():
        if team.is_first:
            sweep(folder)
            progress.file = folder / "log.txt"
        team.tell(None)  # the folder is there, and ours
        context = prepare(recipe, folder, progress, team)
        made: dict[str, tuple[Artifact, bool, float]] = {}
        parent: Artifact | None = None
        check_model_once = context.count_macs
        macs: dict[str, int] = {}
        for step in steps:
            force = force or step.id == start
            if (named := input_named(step)) is not None:
                parent = checkpoint_named(named, context)
                context = replace(context, count_macs=partial(_counted, check_model_once, macs[parent.id]))
            context = replace(context, teachers=teachers_of(step, parent, context))
            result, cached, seconds = advance(step, parent, context, folder, force or step.id == again)
            made[str(step.id)] = (result, cached, seconds)
            if is_variant(step, steps):
                context = replace(context, checkpoints={**context.checkpoints, str(step.id): result})
            if isinstance(step, Evaluate) and parent is not None:
                macs[parent.id] = result.metrics["macs"]
                predictions = {**context.predictions, parent.id: result.path / result.metrics["predictions"]}
                context = replace(context, predictions=predictions, count_macs=partial(_counted, check_model_once, macs[parent.id]))
            if result.kind == "model_repository" and team.is_first:
                link_repository(folder, result)
            parent = result if result.kind not in ("evaluation", "latency") else parent
        contents: dict[str, Any] = {}
        if team.is_first:
            write_lock(folder, dump(recipe), environment.fingerprint(), made)
            contents = finish(folder, context.data, progress.warnings)
        return Outcome(folder, team.tell(contents))


def measure_again(folder: Path, progress: ConsoleProgress | None = None) -> Outcome:
    """Measures the latency of a finished run once more, every engine at every shape, and writes the report again.

    Raises:
        InputError: The folder holds no finished run, or the run has no engines.
    """
    recipe = check(open_run(folder).recipe)
    if not any(isinstance(stage, Export) for stage in recipe.stages):
        raise InputError(f"{folder}: has no engines to measure; add `- export: {{}}` to the stages of the recipe and run it")
    return run(recipe, folder, again="latency", progress=progress)


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
    tokenizer = settled(recipe.tokenizer, context.data.tokenizer)
    config = check_model(recipe.model, num_classes(context.task, context.data.labels), context.max_length, tokenizer).config
    _check_stages(recipe, config, context)
    return count(config, context.task, context.max_length).macs


def _counted(check: Callable[[], int], macs: int) -> int:
    """Checks the model of the recipe, and returns the multiply-accumulates of what has become of it."""
    check()
    return macs


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
    return checkpoint_named(name, context)


def checkpoint_named(name: str, context: Context) -> Artifact:
    """Returns the checkpoint that a recipe calls `baseline`, or by the id of its stage."""
    return context.baseline if name == "baseline" else context.checkpoints[name]


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


def finish(folder: Path, data: Data, warnings: list[str]) -> dict[str, Any]:
    """Writes everything that is derived from the artifacts: flips, golden rows, report; returns the contents of `report.json`."""
    finished = open_run(folder)
    hops.write_flips(finished, data)
    hops.write_golden(finished, data)
    return report.write(folder, warnings)


def plan_steps(recipe: Recipe) -> list[Stage]:
    """Returns the stages of a recipe with the implicit ones: the model before, an evaluation after each variant, latency after export."""
    steps: list[Stage] = []
    finetunes = any(isinstance(stage, Finetune) for stage in recipe.stages)
    source = Source(id="model" if finetunes else "baseline", model=recipe.model, tokenizer=recipe.tokenizer)
    for stage in (source, *recipe.stages):
        steps.append(stage)
        if is_variant(stage, (source, *recipe.stages)):
            steps.append(Evaluate(id=f"evaluate-{stage.id}"))
        if isinstance(stage, Export):
            steps.append(Latency(id="latency"))
    return steps


def advance(step: Stage, parent: Artifact | None, context: Context, folder: Path, force: bool) -> tuple[Artifact, bool, float]:
    """Finds the artifact of a step under its cache key, or makes it; of several processes the first one does.

    Returns:
        The artifact, whether it was there already, and the seconds it took to make it.
    """
    team = context.team
    key = team.tell(cache_key(step, parent, context) if team.is_first else "")
    destination = folder / "stages" / f"{step.id}-{key[:8]}"
    found = None if force or not team.is_first else _find(destination, key, context)
    if team.tell(found is not None):
        context.progress.log(f"{step.id}: unchanged, taken from {destination}")
        found = found or artifact.load(destination)
        return found, True, float(found.manifest["seconds"])
    macs = context.macs  # before the first step that has something to do, the model has to be fit for all of them
    context.progress.log(f"{step.id}: running")
    started = time.monotonic()
    scratch = f".{step.id}-{key[:8]}.scratch" + (f".{team.rank}" if team.rank else "")
    context = replace(context, scratch=folder / "stages" / scratch, team=team if step.TOGETHER else ALONE)
    if not team.is_first:
        return _join_in(step, parent, context, destination, team), False, time.monotonic() - started
    if force:  # a checkpoint inside the stage belongs to the earlier attempt
        shutil.rmtree(context.scratch, ignore_errors=True)
    with artifact.writing(destination) as temporary:
        metrics = step.run(parent, context, temporary)  # type: ignore[arg-type]
        seconds = time.monotonic() - started
        fields = {
            "stage": step.NAME,
            "config": step.model_dump(mode="json"),
            "seed": context.seed,
            **context.fingerprint,
            "metrics": metrics,
            "seconds": seconds,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        parents = [parent.digest] if parent else []
        artifact.seal(temporary, id=str(step.id), kind=step.PRODUCES, key=key, parents=parents, fields=fields)
    shutil.rmtree(context.scratch, ignore_errors=True)
    history.record(step.NAME, step.work(macs, context.data), seconds)
    context.progress.log(f"{step.id}: done in {seconds:.1f} s")
    team.tell(None)  # the artifact is there
    return artifact.load(destination), False, seconds


def _join_in(step: Stage, parent: Artifact | None, context: Context, destination: Path, team: Team) -> Artifact:
    """Takes part in a step that the first process makes, or waits until it is made; returns its artifact."""
    if step.TOGETHER:
        with tempfile.TemporaryDirectory() as unused:
            step.run(parent, context, Path(unused))  # type: ignore[arg-type]
        shutil.rmtree(context.scratch, ignore_errors=True)
    team.tell(None)
    return artifact.load(destination)


def cache_key(step: Stage, parent: Artifact | None, context: Context) -> str:
    """Returns the digest of everything that the output of a step depends on.

    Checkpoints depend on what training sees; everything that is built or measured also depends on the target, the library versions and
    the hardware. The name of the run and the goals never enter.
    """
    contents: dict[str, Any] = {
        "stage": step.NAME,
        "version": step.VERSION,
        "config": step.model_dump(mode="json", exclude={"input"}),  # that is the parent
        "depends": step.depends(context),
        "parent": parent.digest if parent else None,
        "teachers": [teacher.digest for teacher in context.teachers],
        "task": context.task,
        "seed": context.seed,
        "data": context.data.digest,
        "max_length": context.max_length,
        "threads": context.target.num_threads,
    }
    if step.PRODUCES != "checkpoint":
        contents |= {"target": context.target.model_dump(mode="json"), **context.fingerprint}
    if step.PRODUCES not in ("checkpoint", "evaluation"):  # these look at every variant
        contents["checkpoints"] = {name: checkpoint.digest for name, checkpoint in context.checkpoints.items()}
    return artifact.digest(contents)


def _find(destination: Path, key: str, context: Context) -> Artifact | None:
    if not destination.exists():
        return None
    try:
        found = artifact.load(destination)
        problems = artifact.verify(found)
    except artifact.DamagedArtifact as error:
        problems = [str(error)]
    if problems:
        context.progress.warn(f"{destination.name}: damaged, made again: {'; '.join(problems)}")
        return None
    return found if found.key == key else None


def is_variant(step: Stage, steps: Sequence[Stage]) -> bool:
    """Whether the output of a step is a row of the report: every checkpoint but the model before its finetuning."""
    return step.PRODUCES == "checkpoint" and not (isinstance(step, Source) and any(isinstance(other, Finetune) for other in steps))


def _check_start(start: str | None, steps: list[Stage]) -> None:
    ids = [str(step.id) for step in steps]
    if start is not None and start not in ids:
        raise InputError(f"--from {start}: no such stage; stages: {', '.join(ids)}{nearest(start, ids)}")


def _check_server(steps: list[Stage]) -> None:
    """Finds out before the first stage whether the server that the last one needs is there."""
    if any(isinstance(step, TritonRepo) and step.serve for step in steps):
        from triton_repo import environment as server

        server.check()
