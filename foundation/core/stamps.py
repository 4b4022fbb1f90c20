"""Stamps of files, by which a cache notices that a file has changed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

Stamps = tuple[tuple[str | int, ...], ...]
SETTLED_NS = 50_000_000
"""A file system writes the time of its clock in steps of up to 10 ms: two changes within one step can have the same time."""


def stamps(files: Iterable[Path]) -> Stamps:
    """Returns name, inode, size and times of files; a cache that has them in its key never returns the contents of a changed file.

    A file that changed a moment ago could change once more at the same time of the clock. The result is then unlike all others, so that the
    file is read again until its time has settled, as Git does with its index.

    Args:
        files: The files; those that do not exist are left out.
    """
    entries: list[tuple[str | int, ...]] = []
    newest = 0
    for file in files:
        try:
            status = file.stat()
        except (OSError, ValueError):  # opening the file reports it
            continue
        entries.append((file.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        newest = max(newest, status.st_ctime_ns)
    if time.time_ns() - newest < SETTLED_NS:
        entries.append((time.perf_counter_ns(),))
    return tuple(entries)
