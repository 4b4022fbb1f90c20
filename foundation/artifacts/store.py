"""A store of artifacts that several runs share, so that a common artifact is made once.

The folder `stages` of such a run is a link to the store; everything else of the run is its own. Artifacts are found by their digest, so two
runs never confuse their artifacts. Several processes work in a store at once: a process that makes an artifact holds a lock on its
name (flock, which ends with the process, however that ends), and processes that need the same artifact wait for it. A folder that shares
nothing takes no locks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STAGES = "stages"
LOCKS = ".locks"
BUILD = "build-"
"""Start of the names of builds that exports share."""


def share(folder: Path, store: Path) -> None:
    """Makes `folder`, which is new or from an earlier call, a run folder whose artifacts are in `store/stages`."""
    (store / STAGES / LOCKS).mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").touch()
    if not (folder / STAGES).is_symlink():
        (folder / STAGES).symlink_to(os.path.relpath(store / STAGES, folder))


def is_shared(folder: Path) -> bool:
    """Whether the artifacts of a run folder are in a store that other runs use."""
    return (folder / STAGES).is_symlink()


@contextmanager
def holding(folder: Path, name: str, log: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock on an artifact of a shared store; waits while another process makes it.

    Args:
        folder: The run folder; nothing is locked if it is not shared.
        name: Name of the folder of the artifact.
        log: Receives a line if the lock is taken.
    """
    if not is_shared(folder):
        yield
        return
    with (folder / STAGES / LOCKS / name).open("a") as lock:
        if not _try(lock.fileno()):
            log(f"{name}: another process is making it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Tries to take the lock file at `path` without waiting; yields whether this process holds it."""
    with path.open("a") as lock:
        yield _try(lock.fileno())


@contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Holds the lock file at `path`; waits for it."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sweep(folder: Path) -> None:
    """Removes the partial files of a killed run, except the training checkpoints within a stage, and what a living process makes."""
    for leftover in [*folder.glob(f"{STAGES}/.*.tmp"), *folder.glob(f"{STAGES}/.*.old"), *folder.glob(".*.tmp")]:
        name = leftover.name.lstrip(".").split(".")[0]
        if not (is_shared(folder) and leftover.parent.name == STAGES):
            _remove(leftover)
            continue
        with claimed(folder / STAGES / LOCKS / name) as mine:
            if mine:
                _remove(leftover)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _try(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
