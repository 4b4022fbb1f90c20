"""The memory of this process and of all processes that it started, at its peak, sampled while a step runs.

Of other processes only private memory counts, so that libraries that many engines have loaded are not counted many times.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

SECONDS = 0.5
"""Between two samples; a sample takes less than a millisecond."""
PROCESSES = Path("/proc")


class Resident:
    """Samples within a `with` block; `peak_bytes` is 0 where the system has no /proc."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.peak_bytes = 0
        self._seconds, self._ended = seconds, threading.Event()
        self._thread = threading.Thread(target=self._sample, name="resident", daemon=True)

    def __enter__(self) -> Resident:
        self.peak_bytes = resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, resident_bytes())

    def _sample(self) -> None:
        while not self._ended.wait(self._seconds):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())


def resident_bytes(root: Path = PROCESSES) -> int:
    """Returns the memory of this process, plus the private memory of its descendants.

    Args:
        root: The folder of all processes.
    """
    own = root / "self"
    return _status(own, ("VmRSS",)) + sum(_status(process, ("RssAnon", "RssShmem")) for process in _below(own, root))


def _below(process: Path, root: Path) -> Iterator[Path]:
    """Yields all descendants of a process; those that end meanwhile are passed over."""
    try:
        lists = [file.read_text(encoding="ascii").split() for file in process.glob("task/*/children")]
    except OSError:
        return
    for child in (root / number for numbers in lists for number in numbers):
        yield child
        yield from _below(child, root)


def _status(process: Path, names: tuple[str, ...]) -> int:
    """Returns the sum of some lines of a status file in bytes; 0 for a process that has ended."""
    try:
        lines = (process / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.partition(":")[0] in names)
