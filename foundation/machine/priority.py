"""A measured process comes before other work: while calls are timed, its threads have a real-time policy.

A call that shares a core with other work takes as long as the scheduler lets it wait. A nice value does not help short calls, since the
kernel lets a running process finish its time slice of milliseconds. A thread of `SCHED_RR` with the lowest priority runs as soon as it can,
and shares its core with other such threads alone (`sched(7)`). Others wait for the length of a block, less than a second. Linux grants this
to root, to processes with CAP_SYS_NICE, and within RLIMIT_RTPRIO. To others it is refused: then disturbed samples are recognized by the
waits of the threads alone (`foundation.machine.waits`).

A process with more threads than cores keeps its policy: its threads would wait for each other's time slices of 100 ms.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SWITCH = "COMPRESS_TIMED_FIRST"
"""Environment variable; with 0 timed calls wait for other work as anything else does."""
TASKS = Path("/proc/self/task")
PRIORITY = 1
"""The lowest real-time priority."""


@contextmanager
def first(threads: int) -> Iterator[bool]:
    """Runs all threads of this process before ordinary ones, and afterwards as before.

    Args:
        threads: How many of them compute.

    Yields:
        Whether they do; False where the system refuses.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    allowed = os.environ.get(SWITCH) != "0" and threads <= len(os.sched_getaffinity(0)) and before[0] == os.SCHED_OTHER
    try:
        yield allowed and _set(os.SCHED_RR, os.sched_param(PRIORITY))
    finally:
        if allowed:
            _set(*before)


def _set(policy: int, param: os.sched_param) -> bool:
    """Gives every thread a policy, which threads that start later inherit; returns whether the system lets it."""
    for thread in [int(one.name) for one in TASKS.iterdir()] if TASKS.exists() else [0]:
        try:
            os.sched_setscheduler(thread, policy, param)
        except PermissionError:  # an ordinary user may not come before others
            return False
        except ProcessLookupError:  # the thread has ended
            continue
    return True
