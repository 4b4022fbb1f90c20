"""Tracks a run while it goes on, in each place that the recipe names.

`tracking` is entered around a run. A place has to be there when the run starts. If it goes away later, the run goes on: what happened is
noted in a file of the run folder, the place is tried again every minute and at the end, and `compress track RUN` sends what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from compress.recipe import Recipe, dump, untracked
from compress.track.mlflow_runs import MlflowRuns, check_mlflow
from compress.track.names import settings
from compress.track.note import MlflowNote, Note, Status, Tracked, WandbNote, now_ms, resumed
from compress.track.server import TrackingFailure
from compress.track.trace_runs import TraceRuns, check_otlp
from compress.track.wandb_runs import WandbRuns, check_wandb
from compress.track_settings import Track
from foundation.artifacts.artifact import MANIFEST, Artifact
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.shown import pasted

SECONDS_BETWEEN_TRIES = 60.0
"""Seconds until a place that was away is tried again."""


class Place(Protocol):
    """Where a run is sent to."""

    @property
    def note(self) -> Note:
        """What the run came to, and what of it the place has; kept in a file of the run folder."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def shown(self) -> str:
        """The run there, for one line."""

    def resume(self) -> str | None:
        """Looks whether the place still has the run, and forgets it if not; returns the line about that.

        Raises:
            TrackingFailure: The place does not answer.
        """

    def send(self) -> None:
        """Sends what the place lacks, in an order that can be broken off anywhere.

        Raises:
            TrackingFailure: The place did not take a part; the parts before it are noted.
        """

    def save(self) -> None:
        """Writes the note."""

    def refusal(self, failure: TrackingFailure) -> InputError:
        """Returns the error of a place that takes nothing when a run starts, or when `compress track` sends it."""


class Tracking:
    """A run that is tracked in one place.

    Args:
        folder: The run folder.
        place: Where it is sent to.
        progress: Where a place that is away is reported.
    """

    def __init__(self, folder: Path, place: Place, progress: ConsoleProgress) -> None:
        self._folder, self._place, self._progress = folder, place, progress
        self._running: str | None = None
        self._failure: TrackingFailure | None = None
        self._next_try = 0.0

    @property
    def note(self) -> Note:
        """What the run came to, and what of it the place has."""
        return self._place.note

    def begin(self) -> None:
        """Creates the run in its place, or resumes it.

        Raises:
            InputError: The place does not answer.
        """
        try:
            line = self._place.resume()
            if line is not None:
                self._progress.log(f"tracking: {line}")
            self._place.send()
        except TrackingFailure as failure:
            raise self._place.refusal(failure) from failure
        self._place.save()
        self._progress.log(f"tracking: {self._place.shown}")

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
        """Notes what a step came to; its run in the place stays the same."""
        known = self.note.steps.get(step)
        if known is not None:
            tracked.id, tracked.sent = known.id, known.sent
        self.note.steps[step] = tracked
        self._try()

    def _try(self, last: bool = False) -> None:
        """Sends what is missing, unless the place was away within the last minute."""
        self._place.save()
        if not last and time.monotonic() < self._next_try:
            return
        try:
            self._place.send()
        except TrackingFailure as failure:
            self._next_try = time.monotonic() + SECONDS_BETWEEN_TRIES
            line = f"tracking: {self._place.name} does not take what is sent ({failure})"
            if last:
                self._progress.warn(f"{line}; the run is not affected, and `{pasted('compress', 'track', self._folder)}` sends the rest")
            elif self._failure is None:
                self._progress.log(f"{line}; the run goes on, and the server is tried again every minute")
            self._failure = failure
        else:
            if self._failure is not None:
                self._progress.log(f"tracking: {self._place.name} is there again; it has everything")
            self._failure = None


class Tracker(Protocol):
    """A run that is tracked in some way."""

    def started(self, step: str) -> None:
        """Notes that a step runs; may be called again while it does."""

    def done(self, step: str, made: Artifact, cached: bool) -> None:
        """Notes the artifact of a step, and whether it came from the cache."""

    def finished(self) -> None:
        """Notes that the run has finished."""

    def ended(self, status: Status) -> None:
        """Notes that the run failed or was stopped, and the step that it was in."""


class Trackings:
    """A run that is tracked in any number of places.

    Args:
        places: The places.
    """

    def __init__(self, places: Sequence[Tracker] = ()) -> None:
        self._places = places

    def started(self, step: str) -> None:
        """Notes that a step runs; may be called again while it does."""
        for place in self._places:
            place.started(step)

    def done(self, step: str, made: Artifact, cached: bool) -> None:
        """Notes the artifact of a step, and whether it came from the cache."""
        for place in self._places:
            place.done(step, made, cached)

    def finished(self) -> None:
        """Notes that the run has finished, and sends its report."""
        for place in self._places:
            place.finished()

    def ended(self, status: Status) -> None:
        """Notes that the run failed or was stopped, and the step that it was in."""
        for place in self._places:
            place.ended(status)


@contextmanager
def tracking(recipe: Recipe, folder: Path, progress: ConsoleProgress, first: bool) -> Iterator[Trackings]:
    """Tracks the run in the block, if its recipe has a `track`; an exception ends the tracked run as failed, or as killed.

    Args:
        recipe: The recipe.
        folder: The run folder, which this process has locked.
        progress: Where the id of the tracked run is shown.
        first: Whether this is the first process of the run; the others track nothing.

    Raises:
        InputError: A place does not answer, or its package is not installed; nothing has run.
    """
    if recipe.track is None or not first:
        yield Trackings()
        return
    plain, begun = dump(untracked(recipe)), list[Tracker]()
    if recipe.track.otlp is not None:
        check_otlp()
    tracked = [Tracking(folder, place, progress) for place in _places(plain, recipe.track, folder)]
    try:
        for one in tracked:
            one.begin()
            begun.append(one)
        if recipe.track.otlp is not None:
            begun.append(TraceRuns.begun(plain, recipe.track, folder, progress))
        yield Trackings(begun)
    except BaseException as error:
        Trackings(begun).ended("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise


def _places(plain: dict[str, object], track: Track, folder: Path) -> Iterator[Place]:
    """Yields the places of a run that starts, or resumes: a run of the same recipe in the same folder is one run of a place.

    Args:
        plain: The recipe as plain data, without `track`.
        track: Where it is tracked.
        folder: The run folder.
    """
    if track.mlflow is not None:
        yield MlflowRuns(folder, resumed(MlflowNote.new(plain, track), folder))
    if track.wandb is not None:
        yield WandbRuns(folder, resumed(WandbNote.new(plain, track), folder))


def step_of(made: Artifact) -> Tracked:
    """Returns what there is to send of a finished step: when its artifact was written, how long that took, and the settings of the step."""
    ended, manifest = int((made.path / MANIFEST).stat().st_mtime * 1000), made.manifest
    numbers = {"seconds": float(manifest["seconds"])}
    if "peak_memory_bytes" in manifest:
        numbers["peak_memory_bytes"] = float(manifest["peak_memory_bytes"])
    started = ended - int(1000 * numbers["seconds"])
    return Tracked(started_ms=started, ended_ms=ended, status="FINISHED", settings=settings(manifest["config"]), numbers=numbers)


def check_server(track: Track) -> None:
    """Checks that each place can be sent to; creates nothing there, and no database file.

    Raises:
        InputError: One does not answer, or its package is not installed.
    """
    if track.mlflow is not None:
        check_mlflow(track.mlflow, track.experiment)
    if track.wandb is not None:
        check_wandb()
    if track.otlp is not None:
        check_otlp()
