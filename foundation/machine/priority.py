"""A measured process comes first: while calls are timed, its threads are scheduled before other work of the machine.

A call that shares a core with other work takes as long as the scheduler lets it wait. With a nice value of -15 a thread has 28 times the
weight of an ordinary one (`sched(7)`), so that other work takes about 3 % of a core that both want. Linux grants this to root, to processes
with CAP_SYS_NICE, and within RLIMIT_NICE. To others it is refused: then disturbed samples are recognized by the waits of the threads alone
(`foundation.machine.waits`). Control groups and sessions that share the cores by weights of their own are not affected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NICE = -15
TASKS = Path("/proc/self/task")


@contextmanager
def first() -> Iterator[int]:
    """Schedules all threads of this process before ordinary ones, and afterwards as before.

    Yields:
        The nice value of this process meanwhile; the one that it had where the system refuses.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if before <= NICE:
        yield before
        return
    _set(NICE)
    try:
        yield os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        _set(before)


def _set(nice: int) -> None:
    """Gives every thread a nice value; threads that start later inherit it."""
    for thread in [int(one.name) for one in TASKS.iterdir()] if TASKS.exists() else [0]:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        except PermissionError:  # an ordinary user may not go before others
            return
        except ProcessLookupError:  # the thread has ended
            continue
