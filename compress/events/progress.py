"""Progress of a run for programs: events instead of lines on the terminal. The log file gets the same lines as always."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from compress.events.model import Event, Figures, Log, Progress, RunStarted, StageFinished, StageStarted, Warned
from compress.events.stdout import EventStream, Unread
from foundation.artifacts.timed import LATENCY, read_latency
from foundation.core.progress import ConsoleProgress
from foundation.core.version import version

SECONDS_BETWEEN_EVENTS = 1.0
"""Of one bar, apart from its first and its last event."""


class EventProgress(ConsoleProgress):
    """Writes events and the log file, and nothing to the terminal; implements `foundation.core.progress.Progress`.

    Args:
        events: Where events are written.
        quiet: Leaves out `log` and `progress`.
        clock: Seconds from any start.
    """

    def __init__(self, events: EventStream, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("silent", clock=clock)
        self._events, self._quiet = events, quiet
        self._stages: list[str] = []
        self._stage: str | None = None
        """Id of the stage that is under way."""

    def run_started(self, name: str, folder: Path, stages: Sequence[str]) -> None:
        """Writes `run_started`."""
        self._stages = list(stages)
        place = str(folder.absolute())
        self._write_event(RunStarted(compress=version(), process=os.getpid(), name=name, folder=place, stages=tuple(stages)))

    def stage_started(self, stage: str) -> None:
        """Writes `stage_started`."""
        self._stage = stage
        self._write_event(StageStarted(stage=stage, number=self._stages.index(stage) + 1, count=len(self._stages)))

    def stage_finished(self, stage: str, folder: Path, figures: Mapping[str, object], seconds: float, *, cached: bool) -> None:
        """Writes the figures of the stage, and `stage_finished`."""
        latency = tuple(read_latency(folder)) if (folder / LATENCY).exists() else None
        self._write_event(Figures(stage=stage, figures=dict(figures), latency=latency))
        self._write_event(StageFinished(stage=stage, cached=cached, seconds=seconds, folder=str(folder.absolute())))
        self._stage = None

    def log(self, message: str) -> None:
        """Writes `log`, and the line to the log file."""
        super().log(message)
        if not self._quiet:
            self._write_event(Log(stage=self._stage, message=message.strip()))

    def warn(self, message: str) -> None:
        """Writes `warning`, and the line to the log file."""
        super().warn(message)
        self._write_event(Warned(stage=self._stage, message=message))

    def tick(self, label: str, message: str, figures: Mapping[str, float] | None = None) -> None:
        """Writes `figures` if there are numbers, else `log`; the log file gets the line."""
        super().tick(label, message)
        if figures is not None:
            self._write_event(Figures(stage=self._stage, label=label, figures=dict(figures)))
        elif not self._quiet:
            self._write_event(Log(stage=self._stage, message=message.strip()))

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Gives `advance(n)`; writes `progress` for its first and its last step, and once a second between them."""
        shown = _Bar(lambda done, seconds: self._write_progress(label, seconds, done, total), self._clock)
        with super().bar(label, total) as advance_log:

            def advance(steps: int) -> None:
                advance_log(steps)
                shown.advance(steps)

            yield advance
        shown.close()

    def _show_alive(self, what: str, seconds: float) -> None:
        try:
            self._write_progress(what, seconds)
        except Unread:  # in a thread, whose exceptions end nothing: the next event of the run raises it again
            self._spoken = self._clock()

    def _write_progress(self, label: str, elapsed_seconds: float, done: int | None = None, total: int | None = None) -> None:
        if self._quiet:
            return
        rate = done / elapsed_seconds if done and elapsed_seconds > 0 else None
        left = None if rate is None or total is None or done is None else max(0.0, (total - done) / rate)
        self._write_event(
            Progress(
                stage=self._stage,
                label=label,
                done=done,
                total=total,
                elapsed_seconds=round(elapsed_seconds, 3),
                steps_per_second=rate,
                remaining_seconds=left,
            )
        )

    def _write_event(self, event: Event) -> None:
        self._spoken = self._clock()
        self._events.write(event)


class _Bar:
    """Counts steps, and shows the first, the last, and between them at most one a second.

    Args:
        show: Takes the steps that are done, and the seconds since the bar was opened.
        clock: Seconds from any start.
    """

    def __init__(self, show: Callable[[int, float], None], clock: Callable[[], float]) -> None:
        self._show, self._clock = show, clock
        self._began, self._done = clock(), 0
        self._shown: tuple[int, float] | None = None
        """Steps and time of the last event."""

    def advance(self, steps: int) -> None:
        """Counts steps."""
        self._done += steps
        if self._shown is None or self._clock() - self._shown[1] >= SECONDS_BETWEEN_EVENTS:
            self._write()

    def close(self) -> None:
        """Shows the last step, unless it was shown."""
        if self._shown is None or self._shown[0] != self._done:
            self._write()

    def _write(self) -> None:
        self._shown = self._done, self._clock()
        self._show(self._done, self._shown[1] - self._began)
