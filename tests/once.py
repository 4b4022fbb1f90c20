"""What is expensive and needed by tests of one module is made once in a test run, although its tests may run in several workers."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """Returns what `make` returned for a new folder. Another worker of the test run waits for it, and gets an equal copy.

    Args:
        factory: Of pytest.
        name: Unique in the whole of the tests.
        make: Fills the folder, which no test may change; what it returns can be pickled.
    """
    own = factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "once" / name
    place.mkdir(parents=True, exist_ok=True)
    done, folder = place / "made.pickle", place / "folder"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                folder.mkdir()
                done.with_suffix(".tmp").write_bytes(pickle.dumps(make(folder)))
                done.with_suffix(".tmp").replace(done)
            return pickle.loads(done.read_bytes())
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # children that outlive this hold the file open
