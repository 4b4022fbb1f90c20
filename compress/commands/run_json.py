"""`compress run --json`: how the command ends, as events."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from compress.commands.exit_status import STATUSES, Failure
from compress.events.model import Error, Event, ProblemParts, Result, RunFinished
from compress.events.progress import EventProgress
from compress.events.stdout import EventStream, Unread, take_stdout
from compress.report.model.contents import Contents
from foundation.core.errors import Problem
from foundation.core.progress import ConsoleProgress


class RunJson:
    """The events of one command; implements `compress.commands.exit_status.Listener`.

    Args:
        events: Where events are written.
        first: Whether this is the first process of the run: the others write only `error`.
        clock: Seconds from any start.
    """

    def __init__(self, events: EventStream, first: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._first, self._clock, self._began = events, first, clock, clock()
        self._result: Result | None = None

    @classmethod
    def on_stdout(cls, first: bool) -> RunJson:
        """Takes standard output of this process for events."""
        return cls(EventStream(take_stdout()), first)

    def progress(self, quiet: bool) -> ConsoleProgress:
        """Returns the progress of the run: the first process writes events, and the others nothing."""
        return EventProgress(self._events, quiet=quiet) if self._first else ConsoleProgress("silent")

    def finished(self, folder: Path, report: Contents) -> None:
        """Notes the outcome, for the last event."""
        self._result = result_of(folder, report)

    def failed(self, failure: Failure) -> None:
        """Writes `error`."""
        if failure.problems:
            self._write(Error(kind=failure.kind, problems=tuple(map(_parts, failure.problems))))

    def ended(self, status: int) -> None:
        """Writes `run_finished`."""
        if self._first:
            seconds = round(self._clock() - self._began, 3)
            self._write(RunFinished(exit_status=status, meaning=STATUSES[status], seconds=seconds, result=self._result))

    def _write(self, event: Event) -> None:
        try:
            self._events.write(event)
        except Unread:  # nobody is there to tell; the exit status says how the command ended
            return


def result_of(folder: Path, report: Contents) -> Result:
    """Returns the outcome of a finished run in a few figures."""
    from compress.report.decision import decision_of  # a recipe is refused before these are loaded
    from compress.report.report import FILE, PAGE

    decision = decision_of(report)
    place = folder.absolute()
    return Result(
        report=str(place / FILE),
        page=str(place / PAGE),
        metric=decision.metric,
        metric_before=decision.before.value,
        metric_after=decision.after.value,
        speedup=decision.speedup.value,
        size_bytes=decision.size_bytes,
        baseline_size_bytes=decision.baseline_bytes,
        served=decision.served,
        goals=decision.goals,
        missed=decision.missed,
    )


def _parts(problem: Problem) -> ProblemParts:
    return ProblemParts(key=problem.key, given=problem.given, allowed=problem.allowed, remedy=problem.remedy, line=str(problem))
