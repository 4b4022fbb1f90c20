"""A run in MLflow: one run with the steps as nested runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from compress.track.names import settings
from compress.track.note import MlflowNote, Tracked, now_ms, resumed, write_note
from compress.track.send import send
from compress.track.server import TrackingFailure, check_place, connect, unreachable
from compress.track_settings import SQLITE, Track
from foundation.artifacts import artifact
from foundation.core.errors import InputError


class MlflowRuns:
    """The runs of a run folder in MLflow.

    Args:
        folder: The run folder.
        note: What the run came to, and what of it the server has.
    """

    def __init__(self, folder: Path, note: MlflowNote) -> None:
        self.note = note
        self._folder, self._server = folder, connect(note.mlflow)

    @classmethod
    def begun(cls, plain: Mapping[str, object], track: Track, folder: Path) -> Self:
        """Returns the runs of a run that starts, or resumes: a run of the same recipe in the same folder is one run of the server."""
        return cls(folder, resumed(new_note(plain, track), folder))

    @property
    def name(self) -> str:
        """The server."""
        return self._server.uri

    @property
    def shown(self) -> str:
        """Run, experiment and server."""
        return f"run {self.note.run.id} of the experiment {self.note.experiment}, {self._server.uri}"

    def resume(self) -> str | None:
        """Looks whether the server still has the run, and forgets it if not; returns the line about that."""
        known = self.note.run.id
        if known is None or self._server.has(known):
            return None
        self.note.forget()
        return f"{self._server.uri} no longer has the run {known}; a new one is created"

    def send(self) -> None:
        """Sends what the server lacks."""
        send(self._server, self.note, self._folder, self.save)

    def save(self) -> None:
        """Writes the note."""
        write_note(self._folder, self.note)

    def refusal(self, failure: TrackingFailure) -> InputError:
        """Returns the error of a server that takes nothing."""
        return unreachable(self._server.uri, failure)


def new_note(plain: Mapping[str, object], track: Track) -> MlflowNote:
    """Returns the note of a run that the server does not know.

    Args:
        plain: The recipe as plain data, without `track`.
        track: Where it is tracked.
    """
    assert track.mlflow is not None, "asked for"
    run = Tracked(started_ms=now_ms(), settings=settings(plain))
    return MlflowNote(
        mlflow=track.mlflow, experiment=track.experiment, model=track.model, recipe=artifact.digest(plain), name=str(plain["name"]), run=run
    )


def check_mlflow(uri: str, experiment: str) -> None:
    """Checks that a server answers; creates nothing there, and no database file.

    Raises:
        InputError: It does not, or its package is not installed.
    """
    check_place(uri)
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).exists():
        return
    server = connect(uri)
    try:
        server.check(experiment)
    except TrackingFailure as failure:
        raise unreachable(server.uri, failure) from failure
