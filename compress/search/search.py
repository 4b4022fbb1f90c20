"""`compress search`: a study of runs that share one store, its front on the evaluation split, and the report.

searches/<name>/
  search.html  search.json   the front, the recommended point, importance of the knobs, every candidate and why it was dropped
  front/NAME.yaml  NAME/     every point of the front: a recipe for `compress run`, and its run on the evaluation split
  trials/NNNN/RUNG/          the runs of each candidate, judged on selection rows: report, lock file and log of their own
  stages/                    the store: artifacts of all of these, each made once
  study.journal              the study (Optuna)
  search.lock.yaml  log.txt  the recipe of the search, and its log
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from compress.reading.resemblance import warn_if_lengths_differ
from compress.recipe import Recipe, dump, untracked
from compress.run.differences import differences
from compress.search import document
from compress.search.baseline import baseline
from compress.search.model import Search
from compress.search.points import evaluate, front
from compress.search.setup import FRONT, TRIALS, Setup
from compress.search.study import JOURNAL, Study
from compress.search.work import Work, rungs_of
from foundation.artifacts.artifact import write_text
from foundation.artifacts.store import LOCKS, STAGES, waited_for
from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.core.progress import ConsoleProgress
from foundation.core.yaml_file import parse_yaml
from foundation.machine.process import keep_freed_memory

LOCK, LOCK_FILE, LOG = ".search", "search.lock.yaml", "log.txt"
MAY_CHANGE = ("name", "search.budget")
"""Keys that may change from one call to the next; a search whose budget is raised resumes."""


@dataclass(frozen=True)
class Outcome:
    """The result of a search."""

    folder: Path
    """The search folder, with `search.html` and `search.json`."""
    contents: Search
    """The contents of `search.json`."""

    @property
    def missed(self) -> list[str]:
        """The goals that the recommended point misses on the evaluation split; `search` where no candidate has finished."""
        chosen = self.contents.recommended
        return ["search"] if chosen is None else list(chosen.missed)


def search(recipe: Recipe, out: Path | None = None, *, progress: ConsoleProgress | None = None) -> Outcome:
    """Searches for the best settings of a recipe; resumes where it was stopped. Several processes may work in one folder.

    Args:
        recipe: A checked recipe with a `search`.
        out: The search folder; default `searches/<name>`.
        progress: Where progress is shown; default: the terminal.

    Raises:
        InputError: The recipe, the space, the model, the data or the machine does not allow the search.
    """
    recipe = untracked(recipe)  # hundreds of candidates are no runs that a team looks at
    folder, progress = folder_of(recipe, out), progress or ConsoleProgress()
    keep_freed_memory()
    setup = Setup.of(recipe, folder, progress)
    open_folder(setup)
    progress.file = folder / LOG
    if (difference := warn_if_lengths_differ(setup.data)) is not None:
        progress.warn(difference)
    study = Study(folder, recipe, setup.knobs, setup.metric.higher_is_better)
    for rung, absent in rungs_of(setup).items():
        progress.log(f"rung {rung.NAME}: {rung.ABOUT}" + (f"; left out: {absent}" if absent else ""))
    progress.log("baseline: the stages that all candidates share")
    started = time.monotonic()
    before = baseline(setup)
    study.note_baseline(time.monotonic() - started)
    Work(setup, study, before).run()
    found = front(study, setup)
    reports = evaluate(found, setup)
    contents = document.write(setup, study, before, found, reports)
    return Outcome(folder, contents)


def folder_of(recipe: Recipe, out: Path | None) -> Path:
    """Returns the search folder."""
    return local(out or Path("searches") / recipe.name, "--out")


def open_folder(setup: Setup) -> None:
    """Creates the search folder, or checks that it is one of the same recipe.

    Raises:
        InputError: There is something else, or the study there is of another recipe.
    """
    folder, file = setup.folder, setup.folder / LOCK_FILE
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / LOCK).is_file())):
        raise InputError(f"{folder}", "not empty and no search folder", remedy="give another folder with --out DIR")
    folder.mkdir(parents=True, exist_ok=True)
    with waited_for(folder / LOCK):
        for name in (f"{STAGES}/{LOCKS}", TRIALS, FRONT):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            write_text(file, yaml.safe_dump({"schema": 1, "recipe": dump(setup.recipe)}, sort_keys=False, allow_unicode=True, width=140))
            return
    changed = differences_from_folder(setup)
    if changed and (folder / JOURNAL).exists():
        raise InputError(
            f"{folder}",
            f"holds the study of another recipe: {', '.join(changed[:5])} {('differs' if len(changed) == 1 else 'differ')}",
            "only search.budget may change",
            "give another --out DIR",
        )


def differences_from_folder(setup: Setup) -> list[str]:
    """Returns the key paths that differ from the recipe of the search folder, without paths that are allowed to differ.

    Raises:
        InputError: The folder has no readable recipe.
    """
    file = setup.folder / LOCK_FILE
    found = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    known = found.get("recipe") if isinstance(found, dict) else None
    if not isinstance(known, dict):
        raise InputError(f"{file}", "damaged", "the folder of the search cannot be used", "give another --out DIR")
    return [found.path for found in differences(known, dump(setup.recipe)) if not found.path.startswith(MAY_CHANGE)]
