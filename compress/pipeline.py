"""The pipeline: a fold of stages over artifacts, with a cache.

    Recipe --> [stage.run(Artifact, Context, folder)]* --> Report

`run` is the whole of it: lock the run folder, read the data, put the implicit steps between the stages of the recipe (`plan_steps`), and
for every step either find the finished artifact under its cache key or make it. An artifact is found by the digest of everything that
went into it, and every byte of it is hashed again before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.artifacts.artifact import Artifact
from compress.artifacts.run_folder import link_repository, locked, open_run, sweep, write_lock
from compress.core.errors import InputError, nearest
from compress.core.progress import ConsoleProgress
from compress.data.splits import Data
from compress.machine import environment
from compress.machine.parallel import ALONE, Team
from compress.machine.process import keep_freed_memory
from compress.recipe import Recipe, check, dump
from compress.report import goals, hops, report
from compress.run.advance import advance
from compress.run.implicit import Evaluate, Latency, Source, is_variant
from compress.run.prepare import prepare
from compress.run.so_far import SoFar
from compress.stage.stage import Stage
from compress.training.finetune import Finetune
from export.export import Export
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
        return goals.missed(self.report)


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
        results: dict[str, tuple[Artifact, bool, float]] = {}
        so_far = SoFar()
        for step in steps:
            force = force or step.id == start
            so_far = so_far.before(step)
            made, cached, seconds = advance(step, so_far, context, folder, force or step.id == again)
            results[str(step.id)] = (made, cached, seconds)
            so_far = so_far.after(step, made, variant=is_variant(step, steps))
            if made.kind == "model_repository" and team.is_first:
                link_repository(folder, made)
        contents: dict[str, Any] = {}
        if team.is_first:
            write_lock(folder, dump(recipe), environment.fingerprint(), results)
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


def _check_start(start: str | None, steps: list[Stage]) -> None:
    ids = [str(step.id) for step in steps]
    if start is not None and start not in ids:
        raise InputError(f"--from {start}: no such stage; stages: {', '.join(ids)}{nearest(start, ids)}")


def _check_server(steps: list[Stage]) -> None:
    """Finds out before the first stage whether the server that the last one needs is there."""
    if any(isinstance(step, TritonRepo) and step.serve for step in steps):
        from triton_repo import environment as server

        server.check()
