"""One step of a run: its finished artifact is found under its cache key, or made."""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from compress.artifacts import artifact
from compress.artifacts.artifact import Artifact
from compress.machine.parallel import ALONE, Team
from compress.run import durations
from compress.run.cache import cache_key, find
from compress.run.so_far import SoFar
from compress.stage.context import Context
from compress.stage.stage import Stage


def advance(step: Stage, so_far: SoFar, context: Context, folder: Path, force: bool) -> tuple[Artifact, bool, float]:
    """Finds the artifact of a step under its cache key, or makes it; of several processes the first one does.

    Args:
        step: The step.
        so_far: What it starts from.
        context: That of the run.
        folder: The run folder.
        force: Make it even where it is found.

    Returns:
        The artifact, whether it was there already, and the seconds it took to make it.
    """
    context, parent, team = so_far.seen_by(step, context), so_far.parent, context.team
    key = team.broadcast(cache_key(step, parent, context) if team.is_first else "")
    destination = folder / "stages" / f"{step.id}-{key[:8]}"
    found = None if force or not team.is_first else find(destination, key, context)
    if team.broadcast(found is not None):
        context.progress.log(f"{step.id}: unchanged, taken from {destination}")
        found = found or artifact.load(destination)
        return found, True, float(found.manifest["seconds"])
    macs = context.count_macs()  # before the first step that has something to do, the model has to be fit for all of them
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
    durations.record(step.NAME, step.work(so_far.macs or macs, context.data), seconds)
    context.progress.log(f"{step.id}: done in {seconds:.1f} s")
    team.broadcast(None)  # the artifact is there
    return artifact.load(destination), False, seconds


def _join_in(step: Stage, parent: Artifact | None, context: Context, destination: Path, team: Team) -> Artifact:
    """Takes part in a step that the first process makes, or waits until it is made; returns its artifact."""
    if step.TOGETHER:
        with tempfile.TemporaryDirectory() as unused:
            step.run(parent, context, Path(unused))  # type: ignore[arg-type]
        shutil.rmtree(context.scratch, ignore_errors=True)
    team.broadcast(None)
    return artifact.load(destination)
