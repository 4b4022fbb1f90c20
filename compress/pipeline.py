"""The pipeline: a fold of stages over artifacts, with a cache.

    Recipe --> [stage.run(Artifact, Context, folder)]* --> Report

`run` locks the run folder, loads the data, adds the implicit steps to the stages of the recipe (`plan_steps`), and for every step either
loads the artifact from the cache or runs the step. The cache key is a digest of all inputs, and all files of an artifact are hashed again
before use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from compress.forecast import Outlook
from compress.reading.resemblance import warn_if_lengths_differ
from compress.recipe import Recipe, check, dump
from compress.report import evaluations, goals, report
from compress.report.flips.flips import write_flips
from compress.report.model.contents import Contents
from compress.run.advance import advance
from compress.run.implicit import Evaluate, is_variant
from compress.run.opened import opened
from compress.run.prepare import prepare, questionable_goals
from compress.run.resident import Resident
from compress.run.sharing import Sharing, opened_store
from compress.run.split_sizes import write_sizes
from compress.run.state import RunState
from compress.run.steps import plan_steps
from compress.run.warm_start import started
from compress.track.tracking import Trackings, tracking
from export.export import Export
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.chain import write_chain
from foundation.artifacts.run_folder import (
    end_list,
    keep_judge,
    link_repository,
    locked,
    open_run,
    start_list,
    write_lock,
)
from foundation.artifacts.store import sweep
from foundation.core.errors import InputError, nearest
from foundation.core.files import local
from foundation.core.progress import ConsoleProgress
from foundation.core.step_names import LATENCY
from foundation.data.splits import Judge, trained_on
from foundation.machine import environment
from foundation.machine.parallel import ALONE, Team
from foundation.machine.process import keep_freed_memory
from foundation.measure.chance import nothing_right
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from triton_repo.triton_repo import TritonRepo

UNSEEN = "a candidate of a search: every figure here is of selection rows, which its stages chose by, too; no evaluation row was used"


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    folder: Path
    """The run folder, with `report.html` and `report.json`."""
    contents: Contents
    """The contents of `report.json`."""

    @cached_property
    def report(self) -> dict[str, Any]:
        """The contents as plain data."""
        return self.contents.written()

    @property
    def missed(self) -> list[str]:
        """The goals that were missed."""
        return goals.missed(self.contents)


def run(
    recipe: Recipe,
    out: Path | None = None,
    *,
    start: str | None = None,
    force: bool = False,
    again: str | None = None,
    progress: ConsoleProgress | None = None,
    team: Team = ALONE,
    judge: Judge = "evaluation",
) -> Outcome:
    """Runs a recipe: every step that is not cached, then the report.

    Args:
        recipe: A checked recipe.
        out: The run folder; default `runs/<name>`.
        start: Id of a stage; it and every later stage run again.
        force: Run every stage again.
        again: Id of a single step to run again.
        progress: Where progress is shown; default: the terminal.
        team: The processes of the run (`foundation.machine.parallel.joined`); all of them make this call with the same arguments.
        judge: The rows that models are judged on; selection leaves the evaluation rows unseen, and the report says so.

    Returns:
        The run folder and its report. A missed goal is not an error; see `Outcome.missed`.

    Raises:
        InputError: The recipe, the model, the data or the machine does not allow the run.
    """
    recipe, folder, team = started(recipe), local(out or Path("runs") / recipe.name, "--out"), recipe.parallel.of(team)
    progress = (progress or ConsoleProgress()) if team.is_first else ConsoleProgress("silent")
    keep_freed_memory()
    steps = _steps_from(recipe, start)
    check_server(recipe)
    opened_folder = _opened(folder, judge, progress) if team.is_first else nullcontext()
    with opened_folder, tracking(recipe, folder, progress, team.is_first) as tracked:
        sharing = opened_store(recipe, folder, progress) if team.is_first else None
        team.broadcast(None)  # the folder exists and is locked
        progress.run_started(recipe.name, folder, [str(step.id) for step in steps])
        with progress.alive("reading data and model"):
            context = prepare(recipe, folder, progress, team, judge)
        _warn_of_data_and_goals(recipe, context, judge)
        results, outlook = dict[str, tuple[Artifact, bool, float]](), Outlook(recipe, context, folder)
        state, baseline = RunState(context), next(step.id for step in steps if isinstance(step, Evaluate))
        for step in steps:
            force = force or step.id == start
            state = state.before(step)
            made, cached, seconds = _watched(step, state, outlook, progress, tracked, sharing, force=force or step.id == again)
            results[str(step.id)] = (made, cached, seconds)
            _warn_of_nothing(step.id == baseline, made, context)
            state = state.after(step, made, variant=is_variant(step, steps))
        contents = Contents()
        if team.is_first:
            write_lock(folder, dump(recipe), environment.fingerprint(), results)
            contents = _reported(folder, context, progress)
            end_list(folder)
        tracked.finished()
        return Outcome(folder, team.broadcast_object(contents))


@contextmanager
def _opened(folder: Path, judge: Judge, progress: ConsoleProgress) -> Iterator[None]:
    """Locks the run folder for the block, and begins the list of its artifacts and its log."""
    with locked(folder):
        keep_judge(folder, judge)
        sweep(folder)
        start_list(folder)
        progress.file = folder / "log.txt"
        yield


def _warn_of_data_and_goals(recipe: Recipe, context: Context, judge: Judge) -> None:
    """Warns of data and goals that are allowed but probably not what was meant."""
    seen = (UNSEEN if judge == "selection" else None, trained_on(context.data), warn_if_lengths_differ(context.data))
    for warning in filter(None, (*seen, *questionable_goals(recipe, context.data))):
        context.progress.warn(warning)


def _watched(
    step: Stage,
    state: RunState,
    outlook: Outlook,
    progress: ConsoleProgress,
    tracked: Trackings,
    sharing: Sharing | None,
    *,
    force: bool,
) -> tuple[Artifact, bool, float]:
    """Does what `advance` does, checks that there is room, and records and tracks what the step took."""
    context = replace(state.context, count_macs=partial(_counted, state.context, outlook, step, tracked))
    progress.stage_started(str(step.id))
    with progress.alive(str(step.id)), Resident() as resident:
        made, cached, seconds = advance(step, replace(state, context=context), outlook.folder, force, sharing)
    progress.stage_finished(str(step.id), made.path, made.metrics, seconds, cached=cached)
    if context.team.is_first and not cached:
        outlook.record(step, seconds, made, resident.peak_bytes)
    tracked.done(str(step.id), made, cached)
    return made, cached, seconds


def _reported(folder: Path, context: Context, progress: ConsoleProgress) -> Contents:
    """Writes the report and the chain after the last step; returns the contents of `report.json`."""
    progress.log("report: figures, intervals and flipped rows")
    with progress.alive("report"):
        return finish(folder, context, progress)


def _counted(context: Context, outlook: Outlook, step: Stage, tracked: Trackings) -> int:
    """Checks before the first step that runs that the model fits all stages, and that there is room; returns the model's MACs for a row."""
    macs = context.count_macs()
    outlook.check(step)
    tracked.started(str(step.id))
    return macs


def _warn_of_nothing(is_baseline: bool, artifact: Artifact, context: Context) -> None:
    """Warns where the evaluation of the baseline says that it gets nothing right."""
    if is_baseline and (wrong := nothing_right(context.task, artifact.metrics["metrics"], artifact.metrics["n"])):
        context.progress.warn(wrong)


def measure_again(folder: Path, progress: ConsoleProgress | None = None) -> Outcome:
    """Measures the latency of a finished run again, every engine at every shape, and rewrites the report.

    Raises:
        InputError: The folder holds no finished run, or the run has no engines.
    """
    recipe = check(opened(folder).recipe)
    if not any(isinstance(stage, Export) for stage in recipe.stages):
        raise InputError(
            f"{folder}", "this run has no engines to measure", remedy="add `- export: {}` to the stages of its recipe and run it again"
        )
    return run(recipe, folder, again=LATENCY, progress=progress)


def finish(folder: Path, context: Context, progress: ConsoleProgress) -> Contents:
    """Writes the repository link, flips, golden rows, sizes of the splits, chain and report from the artifacts; warns of what the figures
    show, and returns the contents of `report.json`."""
    finished = open_run(folder)
    link_repository(folder, finished.of_kind("model_repository"))
    write_flips(finished, context.data)
    evaluations.write_golden(finished, context.data)
    write_sizes(folder, finished.artifacts[finished.baseline].path, context)
    write_chain(finished)
    contents = report.write(folder, progress.warnings)
    for warning in contents.warnings[len(progress.warnings) :]:
        progress.warn(warning)
    return contents


def _steps_from(recipe: Recipe, start: str | None) -> list[Stage]:
    """Returns the steps, and checks that one of them is called as `start` says."""
    steps = plan_steps(recipe)
    ids = [str(step.id) for step in steps]
    if start is not None and start not in ids:
        raise InputError(f"--from {start}", "no such stage", f"stages: {', '.join(ids)}{nearest(start, ids)}")
    return steps


def check_server(recipe: Recipe) -> None:
    """Checks before the first stage runs that the Triton server of the last stage is installed.

    Raises:
        InputError: It is not.
    """
    if recipe.target.device == "cpu" and any(isinstance(stage, TritonRepo) and stage.serve for stage in recipe.stages):
        from triton_repo import environment as server

        server.check()
