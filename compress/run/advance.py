"""One step of a run: load its artifact from the cache, or run the step."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from compress.run.cache import DEPENDS_ON, depends_on, explain_miss, find
from compress.run.sharing import Sharing
from compress.run.state import RunState
from foundation.artifacts import artifact, chain
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.run_folder import list_artifact
from foundation.artifacts.store import holding
from foundation.machine.parallel import Team
from foundation.machine.process import peak_memory_bytes
from foundation.stage.context import Context
from foundation.stage.stage import Stage


def advance(step: Stage, state: RunState, folder: Path, force: bool, sharing: Sharing | None = None) -> tuple[Artifact, bool, float]:
    """Returns the artifact of a step from the cache, or runs the step; of several processes only the first one writes.

    Args:
        step: The step.
        state: The state before the step.
        folder: The run folder.
        force: Run the step even if its artifact is cached.
        sharing: The store that the run shares; None in all processes but the first, and where there is none.

    Returns:
        The artifact, whether it was cached, and the seconds that the step took.
    """
    context, team = state.context_for(step), state.context.team
    inputs = depends_on(step, state.parent, context) if team.is_first else {}
    key = team.broadcast(artifact.digest(inputs) if team.is_first else "")
    destination = folder / "stages" / f"{step.id}-{key[:8]}"
    if team.is_first:
        list_artifact(folder, destination.name)
    with holding(folder, destination.name, context.progress.log) if team.is_first else nullcontext():
        return _load_or_run(step, state, context, destination, key, inputs, force, sharing)


def _load_or_run(
    step: Stage,
    state: RunState,
    context: Context,
    destination: Path,
    key: str,
    inputs: Mapping[str, object],
    force: bool,
    sharing: Sharing | None,
) -> tuple[Artifact, bool, float]:
    """Does what `advance` says.

    Args:
        step: The step.
        state: The state before the step.
        context: The context of the step.
        destination: The folder of its artifact.
        key: Its cache key.
        inputs: What that is the digest of; empty in all processes but the first.
        force: Run the step even if its artifact is cached.
        sharing: The store that the run shares.
    """
    parent, team, folder = state.parent, context.team, destination.parent.parent
    found = None if force or not team.is_first else _look_up(step, context, destination, key, sharing)
    if team.broadcast(found is not None):
        found = found or artifact.load(destination)
        return found, True, found.manifest["seconds"]
    context.count_macs()  # checks, before the first step that runs, that the model fits all stages
    context.progress.log(f"{step.id}: running")
    if team.is_first and not force and (difference := explain_miss(step, destination.parent, inputs)):
        context.progress.log(f"  {difference}")
    started = time.monotonic()
    scratch = f".{step.id}-{key[:8]}.scratch" + (f".{team.rank}" if team.rank else "")
    profiles = None if context.profiles is None else context.profiles / destination.name
    context = replace(context, scratch=folder / "stages" / scratch, team=step.team(team), profiles=profiles, forced=force)
    if not team.is_first:
        return _join_in(step, parent, context, destination, team), False, time.monotonic() - started
    if force:  # a checkpoint within the stage belongs to an earlier attempt
        shutil.rmtree(context.scratch, ignore_errors=True)
    chain.forget(folder, f"stages/{destination.name}/{artifact.MANIFEST}")
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
            "peak_memory_bytes": peak_memory_bytes(),
            DEPENDS_ON: inputs,
        }
        parents = [parent.digest] if parent else []
        artifact.seal(temporary, id=str(step.id), kind=step.PRODUCES, key=key, parents=parents, fields=fields)
    shutil.rmtree(context.scratch, ignore_errors=True)
    context.progress.log(f"{step.id}: done in {seconds:.1f} s")
    team.broadcast(None)  # the artifact is written
    return _uploaded(artifact.load(destination), sharing, force), False, seconds


def _uploaded(made: Artifact, sharing: Sharing | None, replaces: bool) -> Artifact:
    """Uploads an artifact if the run shares a store; returns it."""
    if sharing is not None:
        sharing.upload(made, replace=replaces)
    return made


def _look_up(step: Stage, context: Context, destination: Path, key: str, sharing: Sharing | None) -> Artifact | None:
    """Returns the artifact of a step from the run folder or from the store; None if the step has to run. Uploads what the store lacks."""
    found = find(destination, key, context)
    if found is not None:
        context.progress.log(f"{step.id}: cached in {destination}")
        if sharing is not None:
            sharing.upload(found, replace=False)
        return found
    if sharing is None:
        return None
    folder = destination.parent.parent
    chain.forget(folder, f"stages/{destination.name}/{artifact.MANIFEST}")
    fetched = sharing.fetch(step, key, destination)
    if fetched is not None:  # the training checkpoint of an earlier attempt is not needed any longer
        shutil.rmtree(folder / "stages" / f".{step.id}-{key[:8]}.scratch", ignore_errors=True)
    return fetched


def _join_in(step: Stage, parent: Artifact | None, context: Context, destination: Path, team: Team) -> Artifact:
    """Takes part in a step of the first process, or waits until it is finished; returns its artifact."""
    if context.team.size > 1:
        with tempfile.TemporaryDirectory() as unused:
            step.run(parent, context, Path(unused))  # type: ignore[arg-type]
        shutil.rmtree(context.scratch, ignore_errors=True)
    team.broadcast(None)
    return artifact.load(destination)
