"""The run folder: locking, writing and reading a run.

`recipe.lock.yaml` holds the resolved recipe and the artifact of each step; everything else about a run follows from these.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

import yaml

from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact, DamagedArtifact
from foundation.core.errors import InputError
from foundation.core.files import local, read_plain
from foundation.core.shown import reason, shown
from foundation.core.step_names import EVALUATION
from foundation.core.version import version
from foundation.core.yaml_file import parse_yaml
from foundation.machine.environment import Fingerprint

LOCK_FILE = "recipe.lock.yaml"
MOST_BYTES = 10_000_000
"""Bytes of that file."""
REPOSITORY = "model_repository"
PROFILES = "profiles"
"""Folder of a run for profiles of its trainings, one folder for each artifact."""
UNFINISHED = ".unfinished"
JUDGE = ".judge"
"""File that names the rows that the run is judged on, if they are not the evaluation rows."""


class StepEntry(TypedDict):
    """A step of a run, in `recipe.lock.yaml`."""

    id: str
    artifact: str
    """Path relative to the folder."""
    digest: str
    cached: bool
    seconds: float


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder."""

    folder: Path
    recipe: Mapping[str, Any]
    """The resolved recipe, as plain data."""
    stages: tuple[StepEntry, ...]
    environment: Fingerprint
    artifacts: Mapping[str, Artifact]
    """Finished artifacts by step id, in execution order."""
    finished: str | None = None
    """When the run finished, ISO 8601 in UTC; None in runs of a version that did not write it."""
    version: str | None = None
    """The version of compress that finished it; None as above."""

    @property
    def variants(self) -> dict[str, Artifact]:
        """The evaluated checkpoints, which are the rows of the report, in order; the first is the baseline."""
        return {name: found for name, found in self.artifacts.items() if f"{EVALUATION}{name}" in self.artifacts}

    @property
    def baseline(self) -> str:
        """Id of the variant that the others are compared with."""
        return next(iter(self.variants))

    def predictions(self, variant: str) -> Path:
        """Returns the file with a variant's torch predictions on the evaluation split."""
        evaluated = self.artifacts[f"{EVALUATION}{variant}"]
        return evaluated.path / str(evaluated.metrics["predictions"])

    def of_kind(self, kind: str) -> Artifact | None:
        """Returns the last artifact of that kind, or None."""
        return next((found for found in reversed(list(self.artifacts.values())) if found.kind == kind), None)


def open_run(folder: Path) -> Run:
    """Reads a run folder.

    Raises:
        InputError: The folder is not a run folder, its run has never finished, or an artifact is missing.
    """
    folder = local(folder, "run folder")
    try:
        text = read_plain(folder / LOCK_FILE, MOST_BYTES).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{folder}", f"not a finished run (no {LOCK_FILE})", remedy="give a folder written by `compress run`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / LOCK_FILE}", f"cannot be read ({reason(error)})", remedy="`compress run` writes it again") from error
    document = parse_yaml(text, str(folder / LOCK_FILE))
    problem = _problem(document)
    if problem is not None:
        raise InputError(f"{folder / LOCK_FILE}", f"damaged ({problem})", remedy="`compress run` writes it again")
    stages = tuple(document["stages"])
    try:
        artifacts = {stage["id"]: artifact.load(folder / stage["artifact"]) for stage in stages}
    except DamagedArtifact as error:
        raise InputError.of([error.problem.advise("`compress run` creates it again")]) from error
    run = Run(folder, document["recipe"], stages, document["environment"], artifacts, document.get("finished"), document.get("compress"))
    if not run.variants:
        raise InputError(f"{folder / LOCK_FILE}", "damaged (no step evaluates a model)", remedy="`compress run` writes it again")
    return run


def _problem(document: object) -> str | None:
    """Describes the damage of `recipe.lock.yaml`; None if there is none."""
    if not isinstance(document, dict):
        return f"{shown(document)} instead of a map"
    for key, kind in (("recipe", dict), ("stages", list), ("environment", dict)):
        if not isinstance(document.get(key), kind):
            return f"{key}: {shown(document.get(key))}"
    for key in ("hardware", "versions"):
        if not isinstance(document["environment"].get(key), dict):
            return f"environment.{key}: {shown(document['environment'].get(key))}"
    for key in ("finished", "compress"):
        if not isinstance(document.get(key, ""), str):
            return f"{key}: {shown(document[key])}"
    known: set[str] = set()
    for position, stage in enumerate(document["stages"]):
        for key, fits in STEP.items():
            if not isinstance(stage, dict) or not fits(stage.get(key)):
                return f"stages[{position}].{key}: {shown(stage.get(key) if isinstance(stage, dict) else stage)}"
        if stage["id"] in known:
            return f"stages[{position}].id: {shown(stage['id'])} is given twice"
        known.add(stage["id"])
    return None


STEP: Mapping[str, Callable[[object], bool]] = {
    "id": lambda value: isinstance(value, str),
    "artifact": lambda value: isinstance(value, str) and re.fullmatch(r"stages/[a-z][a-z0-9_-]*", value) is not None,
    "digest": lambda value: isinstance(value, str),
    "cached": lambda value: isinstance(value, bool),
    "seconds": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
"""Keys of each step in `recipe.lock.yaml`, with a check of their values."""


@contextmanager
def blaming_damage(folder: Path) -> Iterator[None]:
    """Reports an error inside the block as damage of a run folder, if files of it differ from their manifests; else passes it on.

    Raises:
        InputError: Files are missing, added or changed.
    """
    try:
        yield
    except InputError:
        raise
    except DamagedArtifact as error:
        raise InputError.of([error.problem.advise("`compress run` creates it again")]) from error
    except Exception as error:  # any: contents that nobody wrote can fail anywhere; the digests show whether it is damage
        problems = [problem for found in open_run(folder).artifacts.values() for problem in artifact.verify(found)]
        if not problems:
            raise
        raise InputError.of(problem.advise("`compress run` creates it again") for problem in problems) from error


def write_lock(
    folder: Path, recipe: Mapping[str, object], environment: Fingerprint, results: Mapping[str, tuple[Artifact, bool, float]]
) -> None:
    """Writes `recipe.lock.yaml`, with the present time and the version of compress.

    Args:
        folder: The run folder.
        recipe: The resolved recipe, as plain data.
        environment: Versions and hardware.
        results: By step id: the artifact, whether it came from the cache, and its seconds.
    """
    stages = [
        {"id": name, "artifact": f"stages/{found.path.name}", "digest": found.digest, "cached": cached, "seconds": round(seconds, 3)}
        for name, (found, cached, seconds) in results.items()
    ]
    document = {
        "schema": 1,
        "recipe": dict(recipe),
        "stages": stages,
        "environment": dict(environment),
        "finished": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "compress": version(),
    }
    artifact.write_text(folder / LOCK_FILE, yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=140))


def check_outside(run: Run, out: Path) -> None:
    """Checks that files of a run may be written to a folder.

    Raises:
        InputError: It lies inside the run folder or holds it, or is no folder.
    """
    place, home = out.resolve(), run.folder.resolve()
    if place == home or home in place.parents or place in home.parents:
        raise InputError(f"{out}", "lies inside the run folder or holds it", remedy=f"give a folder outside of {run.folder}")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise InputError(f"{out}", "is not a folder", remedy="give a new one")


def link_repository(folder: Path, artifact: Artifact | None) -> None:
    """Atomically points the run's `model_repository` link at the repository inside an artifact; None removes the link of an earlier recipe.

    Raises:
        InputError: Something other than a link has this name.
    """
    link, temporary = folder / REPOSITORY, folder / f".{REPOSITORY}.tmp"
    if os.path.lexists(link) and not link.is_symlink():
        raise InputError(
            f"{link}", "is not a link, so it is not of this run", remedy="move it away and run again; finished stages are kept"
        )
    if artifact is None:
        link.unlink(missing_ok=True)
        return
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path("stages") / artifact.path.name / REPOSITORY)
    temporary.replace(link)


def start_list(folder: Path) -> None:
    """Starts the list of the artifacts of the current run; it exists until the run has finished, so that `clean` does not remove them."""
    (folder / UNFINISHED).write_text("", encoding="utf-8")


def list_artifact(folder: Path, name: str) -> None:
    """Adds an artifact folder to that list, before it is looked up or made."""
    with (folder / UNFINISHED).open("a", encoding="utf-8") as stream:
        stream.write(f"{name}\n")


def end_list(folder: Path) -> None:
    """Removes the list: the lock file of the run replaces it."""
    (folder / UNFINISHED).unlink(missing_ok=True)


def unfinished(folder: Path) -> set[str]:
    """Returns the artifact folders of a run that was stopped; empty if the last run has finished."""
    path = folder / UNFINISHED
    return set(path.read_text(encoding="utf-8").split("\n")) - {""} if path.exists() else set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the run folder for this process; the lock ends with the process, however that ends.

    Raises:
        InputError: Another process holds the lock, or the folder is not a run folder.
    """
    folder = local(folder, "--out")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}", "is a file", remedy="give a new folder, or the folder of an earlier run, with --out DIR")
    # copies of a run often lack its hidden files: `cp -r RUN/*`, artifacts of CI services
    is_run = (folder / ".lock").exists() or ((folder / LOCK_FILE).exists() and (folder / "stages").is_dir())
    if folder.exists() and any(folder.iterdir()) and not is_run:
        raise InputError(f"{folder}", "not empty and not a run folder", remedy="give another folder with --out DIR")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "(unknown id)"
            raise InputError(f"{folder}", f"process {holder} is writing to it", remedy="wait for it, or give another --out DIR") from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def keep_judge(folder: Path, judge: str) -> None:
    """Records in a new run folder which rows its models are judged on, and refuses other rows later.

    Raises:
        InputError: The folder was judged on other rows.
    """
    note, usual = folder / JUDGE, "evaluation"
    known = note.read_text(encoding="utf-8").strip() if note.is_file() else judge
    if judge != known:
        raise InputError(
            f"{folder}",
            f"a candidate of a search, whose figures are of {known} rows",
            remedy=f"run its {LOCK_FILE} with another --out DIR to get those of {judge} rows",
        )
    if judge != usual:
        artifact.write_text(note, judge)
