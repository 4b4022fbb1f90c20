"""`compress track`: sends to the tracking server what it does not have of a run, or a finished run that was not tracked."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from compress.problems import explain
from compress.track.note import Note, read_note
from compress.track.server import TrackingFailure, connect, unreachable
from compress.track.tracking import Tracking, new_note, now_ms, step_of
from compress.track_settings import Track, absolute
from foundation.artifacts.run_folder import Run, locked, open_run
from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.core.progress import ConsoleProgress


def track(folder: Path, mlflow: str | None = None, experiment: str = "compress", progress: ConsoleProgress | None = None) -> str:
    """Sends what is missing, and returns one line that says where.

    A run that was killed while it was tracked ends as killed. Nothing is sent twice.

    Args:
        folder: A run folder: of a run that was tracked, or with `mlflow` of any finished run.
        mlflow: URI of a server; None: the server that the run was sent to.
        experiment: The experiment, for a server that is given.
        progress: Where it is shown; default: the terminal.

    Raises:
        InputError: The run was never tracked and no server is given, the server does not answer, the run has not finished, or another
            process writes to it.
    """
    folder = local(folder, "run folder")
    wanted = None if mlflow is None else _checked(mlflow, experiment)
    note = read_note(folder)
    if wanted is None and note is None:
        remedy = "give --mlflow URI, or put `track: {mlflow: URI}` into its recipe and run it again"
        raise InputError(f"{folder}", "a run that was never tracked", remedy=remedy)
    if note is None or _is_elsewhere(note, wanted):
        open_run(folder)  # a folder that is no finished run is not locked, and so not created
    with locked(folder):
        return _sent(folder, wanted, progress or ConsoleProgress("quiet"))


def _checked(mlflow: str, experiment: str) -> Track:
    try:
        return Track(mlflow=absolute(mlflow, Path.cwd()), experiment=experiment)
    except ValidationError as error:
        raise InputError.of(explain(error, Track, "track")) from error


def _sent(folder: Path, wanted: Track | None, progress: ConsoleProgress) -> str:
    """Does what `track` says, in a folder that is locked."""
    note = read_note(folder)
    if note is None or _is_elsewhere(note, wanted):
        assert wanted is not None, "checked before"
        note = _of_finished(open_run(folder), wanted)
    elif note.run.status == "RUNNING":  # nobody runs it: the folder is locked here
        note.end_all("KILLED", now_ms())
    server = connect(note.mlflow)
    try:
        Tracking(folder, note, server, progress).begin()
    except TrackingFailure as failure:
        raise unreachable(server.uri, failure) from failure
    return f"{folder}: {note.run.status.lower()}, run {note.run.id} of the experiment {note.experiment}, {note.mlflow}"


def _is_elsewhere(note: Note, wanted: Track | None) -> bool:
    """Whether a run was sent to another place than the one that is wanted."""
    return wanted is not None and (note.mlflow, note.experiment) != (wanted.mlflow, wanted.experiment)


def _of_finished(run: Run, wanted: Track) -> Note:
    """Returns the note of a finished run that the server does not know."""
    note = new_note({key: value for key, value in run.recipe.items() if key != "track"}, wanted)
    note.steps = {stage["id"]: step_of(run.artifacts[stage["id"]]) for stage in run.stages}
    note.run.started_ms = min(step.started_ms for step in note.steps.values())
    note.run.ends("FINISHED", max(step.ended_ms or 0 for step in note.steps.values()))
    return note
