"""Tracks a run while it goes on: one run of the tracking server with the steps as nested runs.

`tracking` is entered around a run. The server has to be there when the run starts. If it goes away later, the run goes on: what happened is
noted in `track.json`, the server is tried again every minute and at the end, and `compress track RUN` sends what is still missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from compress.recipe import Recipe, dump, untracked
from compress.track.names import settings
from compress.track.note import Note, Status, Tracked, read_note, write_note
from compress.track.send import send
from compress.track.server import Server, TrackingFailure, check_place, connect, unreachable
from compress.track_settings import SQLITE, Track
from foundation.artifacts import artifact
from foundation.artifacts.artifact import MANIFEST, Artifact
from foundation.core.progress import ConsoleProgress
from foundation.core.shown import pasted

SECONDS_BETWEEN_TRIES = 60.0
"""Seconds until a server that was away is tried again."""


class Tracking:
    """A run that is tracked.

    Args:
        folder: The run folder.
        note: What the run came to, and what of it the server has.
        server: The server.
        progress: Where it is said that the server is away.
    """

    def __init__(self, folder: Path, note: Note, server: Server, progress: ConsoleProgress) -> None:
        self.note = note
        self._folder, self._server, self._progress = folder, server, progress
        self._running: str | None = None
        self._failure: TrackingFailure | None = None
        self._next_try = 0.0

    def begin(self) -> None:
        """Creates the run of the server, or resumes it.

        Raises:
            TrackingFailure: The server does not answer.
        """
        known = self.note.run.id
        if known is not None and not self._server.has(known):
            self._progress.log(f"tracking: {self._server.uri} no longer has the run {known}; a new one is created")
            self.note.forget()
        self._send()
        self._progress.log(f"tracking: run {self.note.run.id} of the experiment {self.note.experiment}, {self._server.uri}")

    def started(self, step: str) -> None:
        """Notes that a step runs; may be called again while it does."""
        if step == self._running:
            return
        self._running = step
        self._note(step, Tracked(started_ms=now_ms()))

    def done(self, step: str, made: Artifact, cached: bool) -> None:
        """Notes the artifact of a step, and whether it came from the cache."""
        self._running, known = None, self.note.steps.get(step)
        if cached and known is not None and known.status == "FINISHED":
            return
        self._note(step, step_of(made))

    def finished(self) -> None:
        """Notes that the run has finished, and sends its report."""
        self.note.run.ends("FINISHED", now_ms())
        self._try(last=True)

    def ended(self, status: Status) -> None:
        """Notes that the run failed or was stopped, and the step that it was in."""
        self.note.end_all(status, now_ms())
        self._try(last=True)

    def _note(self, step: str, tracked: Tracked) -> None:
        """Notes what a step came to; its run of the server stays the same."""
        known = self.note.steps.get(step)
        if known is not None:
            tracked.id, tracked.sent = known.id, known.sent
        self.note.steps[step] = tracked
        self._try()

    def _send(self) -> None:
        send(self._server, self.note, self._folder, self._save)

    def _save(self) -> None:
        write_note(self._folder, self.note)

    def _try(self, last: bool = False) -> None:
        """Sends what is missing, unless the server was away within the last minute."""
        self._save()
        if not last and time.monotonic() < self._next_try:
            return
        try:
            self._send()
        except TrackingFailure as failure:
            self._next_try = time.monotonic() + SECONDS_BETWEEN_TRIES
            line = f"tracking: {self._server.uri} does not take what is sent ({failure})"
            if last:
                self._progress.warn(f"{line}; the run is not affected, and `{pasted('compress', 'track', self._folder)}` sends the rest")
            elif self._failure is None:
                self._progress.log(f"{line}; the run goes on, and the server is tried again every minute")
            self._failure = failure
        else:
            if self._failure is not None:
                self._progress.log(f"tracking: {self._server.uri} is there again; it has everything")
            self._failure = None


@contextmanager
def tracking(recipe: Recipe, folder: Path, progress: ConsoleProgress, first: bool) -> Iterator[Tracking | None]:
    """Tracks the run in the block, if its recipe has a `track`; an exception ends the tracked run as failed, or as killed.

    Args:
        recipe: The recipe.
        folder: The run folder, which this process has locked.
        progress: Where the id of the tracked run is shown.
        first: Whether this is the first process of the run; the others track nothing.

    Raises:
        InputError: The server does not answer, or its package is not installed; nothing has run.
    """
    if recipe.track is None or not first:
        yield None
        return
    server = connect(recipe.track.mlflow)
    tracked = Tracking(folder, begun(recipe, recipe.track, folder), server, progress)
    try:
        tracked.begin()
    except TrackingFailure as failure:
        raise unreachable(server.uri, failure) from failure
    try:
        yield tracked
    except BaseException as error:
        tracked.ended("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise


def step_of(made: Artifact) -> Tracked:
    """Returns what there is to send of a finished step: when its artifact was written, how long that took, and the settings of the step."""
    ended, manifest = int((made.path / MANIFEST).stat().st_mtime * 1000), made.manifest
    numbers = {"seconds": float(manifest["seconds"])}
    if "peak_memory_bytes" in manifest:
        numbers["peak_memory_bytes"] = float(manifest["peak_memory_bytes"])
    started = ended - int(1000 * numbers["seconds"])
    return Tracked(started_ms=started, ended_ms=ended, status="FINISHED", settings=settings(manifest["config"]), numbers=numbers)


def begun(recipe: Recipe, track: Track, folder: Path) -> Note:
    """Returns the note of a run that starts, or resumes: a run of the same recipe in the same folder is one run of the server."""
    plain = dump(untracked(recipe))
    fresh = new_note(plain, track)
    known = read_note(folder)
    if known is None or (known.mlflow, known.experiment, known.recipe) != (fresh.mlflow, fresh.experiment, fresh.recipe):
        return fresh
    known.run.status, known.run.ended_ms, known.model = "RUNNING", None, track.model
    return known


def new_note(plain: Mapping[str, object], track: Track) -> Note:
    """Returns the note of a run that the server does not know.

    Args:
        plain: The recipe as plain data, without `track`.
        track: Where it is tracked.
    """
    run = Tracked(started_ms=now_ms(), settings=settings(plain))
    return Note(
        mlflow=track.mlflow, experiment=track.experiment, model=track.model, recipe=artifact.digest(plain), name=str(plain["name"]), run=run
    )


def check_server(track: Track) -> None:
    """Checks that a tracking server answers; creates nothing there, and no database file.

    Raises:
        InputError: It does not, or its package is not installed.
    """
    check_place(track.mlflow)
    if track.mlflow.startswith(SQLITE) and not Path(track.mlflow.removeprefix(SQLITE)).exists():
        return
    server = connect(track.mlflow)
    try:
        server.check(track.experiment)
    except TrackingFailure as failure:
        raise unreachable(server.uri, failure) from failure


def now_ms() -> int:
    """Returns the milliseconds since 1970."""
    return int(time.time() * 1000)
