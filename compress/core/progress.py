"""Progress for people and for files: bars with rate and remaining time on a terminal, plain lines elsewhere, all lines in `log.txt`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Volume = Literal["silent", "quiet", "normal", "verbose"]
SECONDS_BETWEEN_LINES = 15.0


class Progress(Protocol):
    """How a stage tells its user where it is; the command line draws bars, a file gets plain lines."""

    def log(self, message: str) -> None:
        """Writes one line."""

    def warn(self, message: str) -> None:
        """Writes one line that must not be overlooked; it is kept for the report."""

    def track(self, items: Iterable[Any], label: str, total: int | None = None) -> Iterator[Any]:
        """Yields `items`, showing rate and remaining time."""

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Gives a function that advances a bar by n."""


class ConsoleProgress:
    """Writes to the terminal (standard error) and appends to a log file; implements `compress.core.progress.Progress`.

    Args:
        volume: `quiet` shows warnings alone on the terminal, `silent` nothing; the log file gets everything.
        file: The log file; set by the pipeline once the run folder is known.
    """

    def __init__(self, volume: Volume = "normal", file: Path | None = None) -> None:
        self.volume = volume
        self.file = file
        self.warnings: list[str] = []
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._started = time.monotonic()

    def log(self, message: str) -> None:
        """Writes one line."""
        self._write(message)
        if self.volume not in ("silent", "quiet"):
            self._console.print(message, markup=False)

    def warn(self, message: str) -> None:
        """Writes one line that is also kept for the report."""
        self.warnings.append(message)
        self._write(f"warning: {message}")
        if self.volume != "silent":
            self._console.print(f"warning: {message}", style="yellow", markup=False)

    def track(self, items: Iterable[Any], label: str, total: int | None = None) -> Iterator[Any]:
        """Yields `items` under a bar; `total` is their number where they have no length."""
        count = total if total is not None else len(items)  # type: ignore[arg-type]
        with self.bar(label, count) as advance:
            for item in items:
                yield item
                advance(1)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Gives `advance(n)` for a bar of `total` steps; off a terminal a line every few seconds says the same."""
        if self._console.is_terminal and self.volume not in ("silent", "quiet"):
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
            with Bars(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True) as bars:
                task = bars.add_task(label, total=total, rate="")
                started, done = time.monotonic(), 0

                def advance(steps: int) -> None:
                    nonlocal done
                    done += steps
                    bars.update(task, advance=steps, rate=f"{done / max(time.monotonic() - started, 1e-9):.1f}/s")

                yield advance
        else:
            yield self._plain(label, total)

    def _plain(self, label: str, total: int) -> Callable[[int], None]:
        started = last = time.monotonic()
        done = 0

        def advance(steps: int) -> None:
            nonlocal done, last
            done += steps
            now = time.monotonic()
            if now - last >= SECONDS_BETWEEN_LINES:
                last, rate = now, done / (now - started)
                self.log(f"  {label}: {done}/{total}, {rate:.1f}/s, {max(0.0, (total - done) / rate):.0f} s left")

        return advance

    def _write(self, message: str) -> None:
        if self.file is not None:
            stamp = time.strftime("%H:%M:%S")
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(f"{stamp} {message}\n")


def failure(message: str) -> None:
    """Writes one line to standard error, and nothing else."""
    sys.stderr.write(message.rstrip("\n") + "\n")
