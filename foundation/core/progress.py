"""Progress for people and for files: bars with rate and remaining time on a terminal, few plain lines elsewhere, all lines in `log.txt`.

There is a line at least every 10 seconds (`ConsoleProgress.alive`): if nothing else was shown, it says what runs, and for how
long.

Without a terminal a bar that has said nothing for 10 seconds shows the newest tick that was held back (an epoch and its loss), or else how
far it is. A tick is shown at once where the last one was shown at least 10 seconds ago; the first and the last tick are always shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from foundation.machine.faults import writing_to

T = TypeVar("T")
Volume = Literal["silent", "quiet", "normal", "verbose"]
SECONDS_BETWEEN_LINES = 10.0
SILENT_SECONDS = 9.0
"""Seconds after which a line says what runs; checked every half second."""


class Progress(Protocol):
    """Progress of a stage; the command line draws bars, a file gets plain lines."""

    def log(self, message: str) -> None:
        """Writes one line."""

    def warn(self, message: str) -> None:
        """Writes one line that must not be overlooked; it is kept for the report."""

    def tick(self, label: str, message: str, figures: Mapping[str, float] | None = None) -> None:
        """Writes one of many lines of the bar `label`, such as one for each epoch; a console need not show all of them.

        Args:
            label: Name of the bar.
            message: The line.
            figures: The numbers in the line by name, for programs.
        """

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """Yields `items`, showing rate and remaining time."""

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Gives a function that advances a bar by n."""


class ConsoleProgress:
    """Writes to the terminal (standard error) and appends to a log file; implements `foundation.core.progress.Progress`.

    Args:
        volume: `quiet` shows only warnings on the terminal, `silent` nothing; the log file gets everything.
        file: The log file; set by the pipeline once the run folder is known.
        clock: Seconds from any start.
    """

    def __init__(self, volume: Volume = "normal", file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.volume = volume
        self.file = file
        self.warnings: list[str] = []
        self._clock = clock
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._open: dict[str, _PlainBar] = {}
        self._at_work: list[tuple[str, float]] = []
        """The running tasks, the innermost last, and when each began."""
        self._drawn_bars = 0
        self._spoken = clock()

    def run_started(self, name: str, folder: Path, stages: Sequence[str]) -> None:
        """Notes that the run folder is locked; the console shows what comes next anyway.

        Args:
            name: `name` of the recipe.
            folder: The run folder.
            stages: Ids of all steps, in order.
        """

    def stage_started(self, stage: str) -> None:
        """Notes that a step begins: it is looked up in the cache, and runs if it is not there. `advance` logs which of the two."""

    def stage_finished(self, stage: str, folder: Path, figures: Mapping[str, object], seconds: float, *, cached: bool) -> None:
        """Notes that the artifact of a step is there; `advance` logs it.

        Args:
            stage: Id of the step.
            folder: Folder of its artifact.
            figures: Figures of its manifest.
            seconds: Seconds that the step took when it ran.
            cached: Whether an earlier run made the artifact.
        """

    def log(self, message: str) -> None:
        """Writes one line."""
        self._line(message)

    def warn(self, message: str) -> None:
        """Writes one line that is also kept for the report."""
        self.warnings.append(message)
        self._write(f"warning: {message}")
        self._spoken = self._clock()
        if self.volume != "silent":
            self._console.print(f"warning: {message}", style="yellow", markup=False)

    @contextmanager
    def alive(self, what: str) -> Iterator[None]:
        """Within the block a line says what runs whenever nothing was shown for 10 seconds; on a terminal a bar shows that itself.

        Args:
            what: What is running, such as the id of a step; of nested blocks the innermost is shown.
        """
        ended = threading.Event()
        thread = threading.Thread(target=self._stay_alive, args=(ended,), name="progress", daemon=True)
        outermost = not self._at_work
        self._at_work.append((what, self._clock()))
        if outermost:
            thread.start()
        try:
            yield
        finally:
            self._at_work.pop()
            if outermost:
                ended.set()
                thread.join()

    def _stay_alive(self, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            self.speak_if_silent()

    def speak_if_silent(self) -> None:
        """Shows what runs if nothing was shown for some seconds."""
        now, at_work = self._clock(), list(self._at_work)
        if at_work and not self._drawn_bars and now - self._spoken >= SILENT_SECONDS:
            what, began = at_work[-1]
            self._show_alive(what, now - began)

    def tick(self, label: str, message: str, figures: Mapping[str, float] | None = None) -> None:
        """Writes one of many lines of the open bar `label`: all of them to the file, but few where there is no terminal."""
        self._write(message)
        if label in self._open:
            self._open[label].tick(message)
        else:
            self._show(message)

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """Yields `items` under a bar; `total` is their number where they have no length."""
        count = total if total is not None else len(items)  # type: ignore[arg-type]
        with self.bar(label, count) as advance:
            for item in items:
                yield item
                advance(1)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Gives `advance(n)` for a bar of `total` steps; without a terminal a line every 10 seconds takes its place."""
        if self._console.is_terminal and self.volume not in ("silent", "quiet"):
            yield from self._drawn(label, total)
            return
        plain = self._open[label] = _PlainBar(label, total, self._show, self._line, self._clock)
        try:
            yield plain.advance
        finally:
            self._open.pop(label, None)  # a bar of the same name inside this one has taken it already
            plain.close()

    def _drawn(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        with Bars(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True) as bars:
            self._drawn_bars += 1
            task = bars.add_task(label, total=total, rate="")
            started, done = self._clock(), 0

            def advance(steps: int) -> None:
                nonlocal done
                done += steps
                bars.update(task, advance=steps, rate=_pace(done / max(self._clock() - started, 1e-9)))

            try:
                yield advance
            finally:
                self._drawn_bars -= 1

    def _line(self, message: str) -> None:
        self._write(message)
        self._show(message)

    def _show_alive(self, what: str, seconds: float) -> None:
        self._show(f"  {what}: {seconds:.0f} s")

    def _show(self, message: str) -> None:
        self._spoken = self._clock()
        if self.volume not in ("silent", "quiet"):
            self._console.print(message, markup=False)

    def _write(self, message: str) -> None:
        if self.file is not None:
            stamp = time.strftime("%H:%M:%S")
            with writing_to(self.file), self.file.open("a", encoding="utf-8") as stream:
                stream.write(f"{stamp} {message}\n")


def _pace(rate: float) -> str:
    """Writes steps per second; of slow steps how long one takes, where the rate would be rounded to little or nothing."""
    return f"{1 / rate:.0f} s each" if 0 < rate < 0.2 else f"{rate:.1f}/s"


class _PlainBar:
    """A bar where there is no terminal: its first and last tick, and between them at most one every 10 seconds.

    Args:
        label: Name of the bar.
        total: Its steps.
        show: Takes a line only for the console: a tick is in the log file already.
        log: Takes a line for the console and the log file.
        clock: Seconds from any start.
    """

    def __init__(self, label: str, total: int, show: Callable[[str], None], log: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._label, self._total, self._show, self._log, self._clock = label, total, show, log, clock
        self._started = self._spoken = clock()
        self._done = 0
        self._ticked: float | None = None
        """Time of the last tick that was shown."""
        self._held: str | None = None
        """The newest tick, if it was not shown."""

    def advance(self, steps: int) -> None:
        """Counts steps; where a line is due, shows the tick that was held back, else how far the bar is."""
        self._done += steps
        now = self._clock()
        if now - self._spoken < SECONDS_BETWEEN_LINES:
            return
        if self._held is not None:
            self._speak(self._held)
            return
        rate = self._done / (now - self._started)
        left = f"{max(0.0, (self._total - self._done) / rate):.0f} s left" if rate else "no step done yet"
        self._log(f"  {self._label}: {self._done}/{self._total}, {_pace(rate)}, {left}")
        self._spoken = now

    def tick(self, message: str) -> None:
        """Shows a tick where it is the first or one is due; holds it back otherwise."""
        if self._ticked is None or self._clock() - self._ticked >= SECONDS_BETWEEN_LINES:
            self._speak(message)
        else:
            self._held = message

    def close(self) -> None:
        """Shows the last tick."""
        if self._held is not None:
            self._speak(self._held)

    def _speak(self, message: str) -> None:
        self._show(message)
        self._held, self._spoken = None, self._clock()
        self._ticked = self._spoken
