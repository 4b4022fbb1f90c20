"""Opens a finished run whose recipe is one: no stage, and so no torch, is loaded."""

from __future__ import annotations

from pathlib import Path

from compress.recipe import check
from foundation.artifacts.run_folder import LOCK_FILE, Run, open_run
from foundation.core.errors import InputError


def opened(folder: Path) -> Run:
    """Returns a finished run whose recipe is one.

    Raises:
        InputError: The folder holds no finished run, or it is damaged.
    """
    run = open_run(folder)
    try:
        check(run.recipe)
    except InputError as error:
        raise InputError.of(problem.within(f"{folder / LOCK_FILE}: recipe") for problem in error.problems) from error
    return run
