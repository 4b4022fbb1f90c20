"""The runs of a comparison: finished, of one task, and each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from compress.report import evaluations, goals
from compress.report.document import Report
from compress.report.model.contents import Contents
from compress.run.opened import opened
from foundation.artifacts.run_folder import LOCK_FILE, Run
from foundation.core.errors import InputError, Problem
from foundation.measure.judged import SEPARATOR
from foundation.measure.metrics import METRICS, Metric

MOST_RUNS = len(ascii_uppercase)


@dataclass(frozen=True, eq=False)
class Side:
    """One of the runs that are compared."""

    key: str
    """A, B, ... in the order of the command: what the run is called in the comparison."""
    path: Path
    """Its folder, as it was given."""
    run: Run
    report: Contents
    """The contents of its report.json."""

    @property
    def metric_name(self) -> str:
        """Name of its primary metric."""
        return self.report.metric.name

    @property
    def metric(self) -> Metric | None:
        """Its primary metric; None where this version does not know it."""
        return evaluations.judged(self.run).metric if SEPARATOR in self.metric_name or self.metric_name in METRICS else None

    @property
    def served_backend(self) -> str | None:
        """The last backend that evaluated what is served: a server, else its engine, else torch."""
        return goals.last_backend(self.report)


def read_sides(folders: Sequence[Path]) -> list[Side]:
    """Returns the runs of a comparison.

    Args:
        folders: Run folders, two or more.

    Raises:
        InputError: These are fewer than two or more than 26, one of them is no finished run, is given twice, or has another task.
    """
    if not 2 <= len(folders) <= MOST_RUNS:
        raise InputError(
            "compare", f"{len(folders)} run folder(s) given", remedy=f"give 2 to {MOST_RUNS}, such as `compress compare runs/a runs/b`"
        )
    problems: list[Problem] = []
    sides: list[Side] = []
    for key, folder in zip(ascii_uppercase, folders, strict=False):
        try:
            run = opened(folder)
            sides.append(Side(key, folder, run, Report.load(run.folder).contents))
        except InputError as error:
            problems += error.problems
    problems += _twice(sides)
    if problems:
        raise InputError.of(problems)
    tasks = {side.run.recipe["model"]["task"]: side for side in reversed(sides)}
    if len(tasks) > 1:
        named = ", ".join(f"{side.path} is {task}" for task, side in reversed(tasks.items()))
        raise InputError("compare", f"runs of different tasks have no common metric: {named}", remedy="give runs of one task")
    return sides


def check_out(out: Path, sides: Sequence[Side]) -> None:
    """Checks that a comparison is not written into a run, whose files nothing but the run writes.

    Raises:
        InputError: It would be.
    """
    for folder in (out.resolve(), *out.resolve().parents):
        if (folder / LOCK_FILE).exists() or any(folder == side.path.resolve() for side in sides):
            raise InputError(f"--out {out}", f"lies within the run {folder}", remedy="give a folder outside of every run")


def _twice(sides: Sequence[Side]) -> list[Problem]:
    """Returns a problem for each run that is given a second time: the same folder by any name, or a copy of it."""
    problems = []
    for place, side in enumerate(sides):
        for earlier in sides[:place]:
            if side.path.resolve() == earlier.path.resolve():
                problems.append(Problem("compare", f"{side.path}: this run is given twice", remedy="give each run once"))
                break
            if (anchor := side.report.integrity.anchor) is not None and anchor == earlier.report.integrity.anchor:
                given = f"{side.path}: a copy of {earlier.path}, with the same files"
                problems.append(Problem("compare", given, remedy="give each run once"))
                break
    return problems
