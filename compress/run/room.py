"""Whether a run has room: its disk space and its memory, checked before the first stage by `compress plan` and `compress run`.

A prediction may be wrong by half. A run is refused if it would not fit even with that much less. There is a warning if it would not fit
with that much more.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foundation.core.errors import Problem
from foundation.machine.process import available_memory_bytes

LEAST = 2 / 3
"""The least share of a prediction that is taken."""
MOST = 1.5
"""The largest one."""


@dataclass(frozen=True)
class Room:
    """Free disk and memory for a run."""

    disk_bytes: int
    """Free on the file system of the run folder, for this user."""
    memory_bytes: int
    """Memory that can still be taken: of the machine, or of a container or control group that allows less."""
    folder: Path
    """The run folder."""

    @classmethod
    def here(cls, folder: Path) -> Room:
        """Looks at this machine; the folder need not exist."""
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        return cls(shutil.disk_usage(there).free, available_memory_bytes(), folder)


@dataclass(frozen=True)
class Shortage:
    """What is missing."""

    refused: tuple[Problem, ...] = ()
    """What is missing even if the run takes less than predicted."""
    warned: tuple[Problem, ...] = ()
    """What may be missing."""


def shortage(disk_bytes: int, memory_bytes: Mapping[str, int], room: Room) -> Shortage:
    """Compares what is predicted with what is there.

    Args:
        disk_bytes: Disk space of all steps that are not cached.
        memory_bytes: The largest memory of each of these steps, by id.
        room: What is there.
    """
    found: dict[bool, list[Problem]] = {True: [], False: []}
    if disk_bytes * MOST > room.disk_bytes:
        missing = max(0, disk_bytes - room.disk_bytes)
        remedy = (
            f"free {shown(missing)}, or give --out a folder on another disk" if missing else "a run that takes more than predicted stops"
        )
        needs = f"this run needs about {shown(disk_bytes)} in {room.folder}"
        problem = Problem("disk", needs, f"{shown(room.disk_bytes)} are free there", remedy)
        found[disk_bytes * LEAST > room.disk_bytes].append(problem)
    step, needed = max(memory_bytes.items(), key=lambda entry: entry[1], default=("", 0))
    if needed * MOST > room.memory_bytes:
        smaller = "end other programs, raise the limit of the container, or give a smaller batch_size or micro_batch_size"
        problem = Problem("memory", f"{step} needs about {shown(needed)}", f"{shown(room.memory_bytes)} are available", smaller)
        found[needed * LEAST > room.memory_bytes].append(problem)
    return Shortage(tuple(found[True]), tuple(found[False]))


def shown(size: int) -> str:
    """Returns a number of bytes for people: 703 MB, 1.20 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
