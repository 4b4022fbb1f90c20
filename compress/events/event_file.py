"""The events of a run in a file of its folder, so that programs follow a run that they did not start, or whose starter is gone.

    RUN/events.jsonl        one event a line, of the last run that was started this way
    RUN/stderr.log          what libraries wrote meanwhile

Whoever starts such a run locks the file, and passes it on as the standard output of `compress run --json`. A lock of flock(2) belongs to
the open file and not to a process: it lasts until the run ends, however that ends, and not until the starter does. So whether the run
works is never guessed from a process id, which the system uses again.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from compress.events.model import ADAPTER
from compress.events.state import RunState
from foundation.core.errors import InputError
from foundation.core.shown import reason

EVENTS, STDERR = "events.jsonl", "stderr.log"
TRIES, BETWEEN_SECONDS = 20, 0.05
"""A reader holds the lock for an instant, so that one refusal says nothing."""


def claim(folder: Path) -> BinaryIO:
    """Returns the empty event file of a run, locked and to be written.

    Raises:
        InputError: A run that writes its events there is still working.
    """
    file = (folder / EVENTS).open("ab", buffering=0)
    for _ in range(TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(BETWEEN_SECONDS)
        else:
            file.truncate(0)
            return file
    file.close()
    raise InputError(f"{folder}", "a run is working in it", remedy="wait for it, stop it, or give another --out DIR")


def is_running(folder: Path) -> bool:
    """Whether the run that writes the event file is still working."""
    with (folder / EVENTS).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def state_of(folder: Path) -> RunState:
    """Returns how far the run is that writes, or wrote, the event file of a folder.

    Raises:
        InputError: The folder has no event file, or the file is damaged.
    """
    file = folder / EVENTS
    if not file.is_file():
        remedy = "call `run` to start one, or `report` for a run that has finished"
        raise InputError(f"{folder}", "no run that a program started", remedy=remedy)
    works = is_running(folder)  # before reading: what a run writes before its end is then read
    *lines, _ = file.read_bytes().split(b"\n")  # behind the last end of a line is a line that is being written
    state = RunState(folder=str(folder.absolute()))
    for number, line in enumerate(lines, 1):
        try:
            state = state.after(ADAPTER.validate_json(line))
        except ValidationError as error:
            raise InputError(f"{file}, line {number}", f"no event ({reason(error)})", remedy="run it again to continue") from error
    return state if works or state.exit_status is not None else state.killed()
