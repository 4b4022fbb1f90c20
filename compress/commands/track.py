"""`compress track`: sends what a tracking server does not have of a run, or a finished run that was not tracked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from compress.problems import explain
from compress.recipe import Recipe
from compress.track.mlflow_runs import MlflowRuns
from compress.track.note import MlflowNote, N, WandbNote, now_ms, read_note
from compress.track.tracking import Place, Tracking, step_of
from compress.track.wandb_runs import WandbRuns
from compress.track_settings import Track, absolute
from foundation.artifacts.run_folder import locked, open_run
from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.core.progress import ConsoleProgress


def track(
    folder: Path,
    mlflow: str | None = None,
    experiment: str = "compress",
    progress: ConsoleProgress | None = None,
    *,
    wandb: str | None = None,
) -> str:
    """Sends what is missing, and returns a line for each place that says where.

    A run that was killed while it was tracked ends as killed. Nothing is sent twice.

    Args:
        folder: A run folder: of a run that was tracked, or with `mlflow` or `wandb` of any finished run.
        mlflow: URI of an MLflow server, and...
        experiment: ... the experiment.
        progress: Where it is shown; default: the terminal.
        wandb: Project of W&B. With neither: the places that the run was sent to.

    Raises:
        InputError: The run was never tracked and no place is given, a place does not answer, the run has not finished, or another
            process writes to it.
    """
    folder = local(folder, "run folder")
    wanted = None if mlflow is None and wandb is None else _checked(mlflow, experiment, wandb)
    notes = (read_note(folder, MlflowNote), read_note(folder, WandbNote))
    if wanted is None and not any(notes):
        remedy = "give --mlflow URI or --wandb PROJECT, or put `track: {mlflow: URI}` into its recipe and run it again"
        raise InputError(f"{folder}", "a run that was never tracked", remedy=remedy)
    if not any(notes):
        open_run(folder)  # a folder that is no finished run is not locked, and so not created
    with locked(folder):
        return "\n".join(_sent(folder, place, progress or ConsoleProgress("quiet")) for place in _places(folder, wanted))


def _checked(mlflow: str | None, experiment: str, wandb: str | None) -> Track:
    try:
        return Track(mlflow=None if mlflow is None else absolute(mlflow, Path.cwd()), experiment=experiment, wandb=wandb)
    except ValidationError as error:
        raise InputError.of(explain(error, Track, "track")) from error


def _places(folder: Path, wanted: Track | None) -> Iterator[Place]:
    """Yields the places that a run is sent to: those that are wanted, or else those that it was sent to."""
    known, written = read_note(folder, MlflowNote), read_note(folder, WandbNote)
    if wanted is None:
        if known is not None:
            yield MlflowRuns(folder, known)
        if written is not None:
            yield WandbRuns(folder, written)
        return
    if wanted.mlflow is not None:
        same = known if known is not None and known.place == (wanted.mlflow, wanted.experiment) else None
        yield MlflowRuns(folder, same or _of_finished(folder, wanted, MlflowNote))
    if wanted.wandb is not None:
        once = written if written is not None and written.place == (wanted.wandb,) else None
        yield WandbRuns(folder, once or _of_finished(folder, wanted, WandbNote))


def _of_finished(folder: Path, wanted: Track, kind: type[N]) -> N:
    """Returns the note of a finished run that a place does not know."""
    run = open_run(folder)
    note = kind.new({key: value for key, value in run.recipe.items() if key not in Recipe.LATER}, wanted)
    note.steps = {stage["id"]: step_of(run.artifacts[stage["id"]]) for stage in run.stages}
    note.run.started_ms = min(step.started_ms for step in note.steps.values())
    note.run.ends("FINISHED", max(step.ended_ms or 0 for step in note.steps.values()))
    return note


def _sent(folder: Path, place: Place, progress: ConsoleProgress) -> str:
    """Sends what is missing in a place, of a folder that is locked; returns the line."""
    note = place.note
    if note.run.status == "RUNNING":  # nobody runs it: the folder is locked here
        note.end_all("KILLED", now_ms())
    Tracking(folder, place, progress).begin()
    return f"{folder}: {note.run.status.lower()}, {place.shown}"
