"""Runs that `compress mcp` starts: each is `compress run --json` in a session of its own, and goes on when the server ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from compress.commands.recipes import load
from compress.events.event_file import STDERR, claim, is_running, state_of
from compress.events.state import RunState
from foundation.artifacts.run_folder import locked
from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.machine.process import environment

COMPRESS = (sys.executable, "-P", "-m", "cli")
"""The command of compress; -P: a file cli.py in the working folder is not it."""
STOP_SECONDS = 60.0
"""Seconds that a stopped run may take to remove what is half-written."""
POLL_SECONDS = 0.2


def start_run(recipe: str, settings: Sequence[str], out: str | None, options: Sequence[str], command: Sequence[str] = COMPRESS) -> Path:
    """Starts a run and returns its folder.

    Args:
        recipe: A YAML file, or the name of a shipped recipe.
        settings: Overrides, KEY.PATH=VALUE.
        out: The run folder; None: runs/NAME.
        options: More options of `compress run`.
        command: The command of compress.

    Raises:
        InputError: The recipe is wrong, the folder is none of a run, or another process writes to it.
    """
    checked = load(recipe, settings)
    folder = local(Path("runs") / checked.name if out is None else Path(out), "--out").absolute()
    with locked(folder):
        events = claim(folder)
    arguments = [f"--out={folder}", *(f"--set={setting}" for setting in settings), *options, "--", recipe]
    with events, (folder / STDERR).open("wb") as errors:
        process = subprocess.Popen(
            [*command, "run", "--json", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=events,
            stderr=errors,
            start_new_session=True,
            env=environment(),
        )
    threading.Thread(target=process.wait, name=f"end of {folder}", daemon=True).start()  # so that no dead process is left behind
    return folder


async def wait(folder: Path, seconds: float) -> RunState:
    """Returns the state of a run once it has ended, or after some seconds.

    Raises:
        InputError: The folder has no event file, or the file is damaged.
    """
    until = time.monotonic() + seconds
    state_of(folder)  # a folder without events is refused at once
    while is_running(folder) and time.monotonic() < until:
        await asyncio.sleep(POLL_SECONDS)  # a server that ends does not wait for it
    return state_of(folder)


async def stop(folder: Path) -> RunState:
    """Stops a run, and returns its state once nothing half-written is left, or after a minute.

    Raises:
        InputError: The folder has no event file, or the run works on another machine.
    """
    until, state = time.monotonic() + STOP_SECONDS, state_of(folder)
    while state.process is None and is_running(folder) and time.monotonic() < until:
        await asyncio.sleep(POLL_SECONDS)  # it is loading libraries
        state = state_of(folder)
    if not is_running(folder):
        return state_of(folder)
    if state.process is None or not _is_of(state.process, folder):
        raise InputError(f"{folder}", "its process is not on this machine", remedy="stop it where it was started")
    os.kill(state.process, signal.SIGTERM)
    return await wait(folder, until - time.monotonic())


def _is_of(process: int, folder: Path) -> bool:
    """Whether a process of this machine runs in a folder: with a shared folder the id may be of another machine."""
    try:
        arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return False
    return os.fsencode(f"--out={folder}") in arguments
