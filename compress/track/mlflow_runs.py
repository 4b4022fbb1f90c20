"""A run in MLflow: one run with the steps as nested runs."""

from __future__ import annotations

from pathlib import Path

from compress.track.note import MlflowNote, write_note
from compress.track.send import send
from compress.track.server import TrackingFailure, check_place, connect, unreachable
from compress.track_settings import SQLITE
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
