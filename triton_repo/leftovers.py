"""Removes what a server leaves behind when it is killed: its shared memory and its temporary folder.

The python backend keeps a region in /dev/shm for every model instance and removes it when the server ends in an orderly way; a killed
server leaves it. So every server is given a prefix of its own, and `reap` starts a process (this file run as a script) that belongs to no
group, waits until the watcher of the server is gone, which is after the server itself, and deletes what bears the prefix.

Left out: a machine that loses power; there the temporary folder stays.
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
    """Starts the process that cleans up when the process `watcher` is gone, whatever happens to this one.

    Args:
        prefix: Beginning of the names of the regions.
        folder: Temporary folder of the server.
        watcher: Process that outlives everybody who uses them.
    """
    command = [sys.executable, "-I", "-S", __file__, prefix, str(folder), str(watcher)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)


def remove(prefix: str, folder: Path) -> None:
    """Deletes every region whose name begins with `prefix`, and the folder."""
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
