"""How long the threads of this process waited for a core: what other work on the machine took from a measurement.

Linux counts for each thread the nanoseconds that it was ready to run without running (/proc/self/task/TID/schedstat, second number). On a
quiet machine it grows only by the waits of the threads for each other: 0.1 to 0.3 ms in a call of OpenVINO with two threads, nothing in a
call of ONNX Runtime. Reading it takes microseconds.

    waited    sum over the threads of the increase since the last reading

Left out: a thread that is waiting at the time of a reading counts in the next one, when it runs again. Time that a hypervisor takes is in
`foundation.machine.load`. Kernels and sandboxes without this file do not report it: `waited_ms` returns None.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

TASKS = Path("/proc/self/task")
TASKS_OF = "/proc/{}/task"
"""The threads of another process."""
SPIN_COUNT = "5000"
"""Turns that a thread of libgomp waits for the others before it sleeps, about 0.1 ms.

The default, 300,000, is several milliseconds: longer than the kernel lets a thread run. Where other work takes one of the cores, the thread
that spins keeps the core that the thread it waits for needs, and one call takes 10 to 40 times as long (benchmarks/spin_count.py). Without
other work a count of 5,000 is as fast as the default; 1,000 and less are up to 1.6 times slower, as threads sleep within a layer.
"""


def bounded_spin() -> dict[str, str]:
    """Returns the environment that bounds how long threads of torch spin; nothing where the user has chosen."""
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    return {} if chosen else {"GOMP_SPINCOUNT": SPIN_COUNT}


class ThreadWaits:
    """The waits of all threads of this process."""

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._files: dict[str, int] = {}
        self._before: dict[str, int] = self._read() or {}

    def waited_ms(self) -> float | None:
        """Returns the milliseconds that all threads waited for a core since the last call; None where the kernel does not report it."""
        now = self._read()
        if now is None:
            return None
        waited = sum(value - self._before.get(thread, 0) for thread, value in now.items())
        self._before = now
        return waited / 1e6

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _read(self) -> dict[str, int] | None:
        """Returns the nanoseconds of each thread that has not ended."""
        try:
            threads = os.listdir(self._tasks)
        except OSError:
            return None
        found = {}
        for thread in threads:
            try:
                if thread not in self._files:
                    self._files[thread] = os.open(self._tasks / thread / "schedstat", os.O_RDONLY)
                found[thread] = int(os.pread(self._files[thread], 64, 0).split()[1])
            except (OSError, IndexError, ValueError):  # it has ended, or there is no such file
                continue
        return found or None


class WaitedShare:
    """How much of the time in which the threads of some processes could have run they waited for a core: waited / (waited + ran).

    Args:
        processes: Ids of the processes.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = tuple(processes)
        self._before = self._read()

    def share(self) -> float | None:
        """Returns the share since the start, 0 to 1; None where the kernel does not report it, or nothing ran. Threads that have ended do
        not count."""
        ran = waited = 0
        for thread, (now_ran, now_waited) in self._read().items():
            ran_before, waited_before = self._before.get(thread, (0, 0))
            ran, waited = ran + now_ran - ran_before, waited + now_waited - waited_before
        return waited / (waited + ran) if ran > 0 else None

    def _read(self) -> dict[Path, tuple[int, int]]:
        """Returns the nanoseconds that each thread ran and waited."""
        found = {}
        for process in self._processes:
            for file in Path(TASKS_OF.format(process)).glob("*/schedstat"):
                try:
                    ran, waited, _ = file.read_text().split()
                except (OSError, ValueError):  # it has ended, or there is no such file
                    continue
                found[file] = int(ran), int(waited)
        return found
