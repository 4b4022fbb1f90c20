"""Removes the shared memory and the temporary folder of a killed server.

The Python backend keeps a region in /dev/shm for each model instance and removes it on an orderly exit; a killed server leaves it behind.
So each server gets a unique prefix, and `reap` starts a process (this file as a script) in a session of its own. It waits until the watcher
of the server is gone, which is after the server itself, and deletes everything with the prefix.

Limitation: after a power failure the temporary folder remains.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def reap(prefix: str, folder: Path, watcher: int) -> subprocess.Popen[bytes]:
    """Starts the process that cleans up once the process `watcher` has ended, whatever happens to this one.

    Args:
        prefix: Prefix of the names of the shared-memory regions.
        folder: Temporary folder of the server.
        watcher: Process id of the watcher, which outlives the server, or of another process that needs the folder.
    """
    command = [sys.executable, "-I", "-S", __file__, prefix, str(folder), str(watcher)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)


def remove(prefix: str, folder: Path) -> None:
    """Deletes the folder and every region whose name starts with `prefix`."""
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _wait_for(process: int) -> None:
    try:
        poller = select.poll()
        poller.register(os.pidfd_open(process), select.POLLIN)
    except ProcessLookupError:
        return
    poller.poll()


if __name__ == "__main__":
    _wait_for(int(sys.argv[3]))
    remove(sys.argv[1], Path(sys.argv[2]))
