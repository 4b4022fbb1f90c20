"""Stamps of files, by which a cache notices that a file has changed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

Stamp = tuple[str | int, ...]
Stamps = tuple[Stamp, ...]
SETTLED_NS = 50_000_000
"""A file system writes the time of its clock in steps of up to 10 ms: two changes within one step can have the same time."""
DAY_NS = 86_400 * 10**9
"""The clock of a file server may be off, but by less: an older file has settled."""


def stamps(files: Iterable[Path]) -> Stamps:
    """Returns device, name, inode, size and times of files; a cache that has them in its key never returns the contents of a changed file.

    A file that changed a moment ago could change once more at the same time of the clock. The result is then unlike all others, so that the
    file is read again until its time has settled, as Git does with its index. The time of a file comes from the clock of its file server,
    which this machine cannot read. So a file of the last day has settled once this process has seen it unchanged for `SETTLED_NS`.

    Args:
        files: The files; those that do not exist are left out.
    """
    entries: list[Stamp] = []
    now, settled = time.time_ns(), True
    for file in files:
        try:
            status = file.stat()
        except (OSError, ValueError):  # opening the file reports it
            continue
        entry = status.st_dev, file.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        entries.append(entry)
        if now - status.st_ctime_ns < DAY_NS and _first_seen(entry) + SETTLED_NS > time.monotonic_ns():
            settled = False
    return tuple(entries) if settled else (*entries, (time.perf_counter_ns(),))


@lru_cache(maxsize=4096)
def _first_seen(entry: Stamp) -> int:
    """Returns the time at which this process first saw a file as it is; a later one if it has forgotten it, which costs a reading."""
    return time.monotonic_ns()
