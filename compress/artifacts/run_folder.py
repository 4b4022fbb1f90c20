"""The run folder: who may write to it, what is in it, and how it is read back.

`recipe.lock.yaml` holds the resolved recipe and which artifact each step came to; everything else about a run follows from these.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from compress.artifacts import artifact
from compress.artifacts.artifact import Artifact, DamagedArtifact
from compress.core.errors import InputError

LOCK_FILE = "recipe.lock.yaml"
REPOSITORY = "model_repository"


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it."""

    folder: Path
    recipe: Mapping[str, Any]
    """The resolved recipe, as plain data."""
    stages: tuple[Mapping[str, Any], ...]
    """For each step: `id`, `artifact` (path below the folder), `digest`, `cached`, `seconds`."""
    environment: Mapping[str, Any]
    artifacts: Mapping[str, Artifact]
    """Finished artifacts by step id, in order."""

    @property
    def variants(self) -> dict[str, Artifact]:
        """The checkpoints that are rows of the report, in order; the first is the baseline."""
        return {name: found for name, found in self.artifacts.items() if f"evaluate-{name}" in self.artifacts}

    def predictions(self, variant: str) -> Path:
        """Returns the file of what a variant answered in torch on the evaluation split."""
        evaluated = self.artifacts[f"evaluate-{variant}"]
        return evaluated.path / str(evaluated.metrics["predictions"])

    def of_kind(self, kind: str) -> Artifact | None:
        """Returns the artifact of that kind that was made last, or None."""
        return next((found for found in reversed(list(self.artifacts.values())) if found.kind == kind), None)


def open_run(folder: Path) -> Run:
    """Reads a run folder.

    Raises:
        InputError: It is none, its run has not finished once, or an artifact is gone.
    """
    try:
        document = yaml.safe_load((folder / LOCK_FILE).read_text(encoding="utf-8"))
        stages = tuple(document["stages"])
        artifacts = {stage["id"]: artifact.load(folder / stage["artifact"]) for stage in stages}
        return Run(folder, document["recipe"], stages, document["environment"], artifacts)
    except FileNotFoundError as error:
        raise InputError(f"{folder}: not a finished run (no {LOCK_FILE}); give a folder that `compress run` has written") from error
    except DamagedArtifact as error:
        raise InputError(f"{error}; `compress run` makes it again") from error
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / LOCK_FILE}: damaged ({error}); `compress run` writes it again") from error


def write_lock(
    folder: Path, recipe: Mapping[str, Any], environment: Mapping[str, Any], made: Mapping[str, tuple[Artifact, bool, float]]
) -> None:
    """Writes `recipe.lock.yaml`.

    Args:
        folder: The run folder.
        recipe: The resolved recipe as plain data.
        environment: Versions and hardware.
        made: For each step id its artifact, whether it was there already, and its seconds.
    """
    stages = [
        {"id": name, "artifact": f"stages/{found.path.name}", "digest": found.digest, "cached": cached, "seconds": round(seconds, 3)}
        for name, (found, cached, seconds) in made.items()
    ]
    document = {"schema": 1, "recipe": dict(recipe), "stages": stages, "environment": dict(environment)}
    artifact.write_text(folder / LOCK_FILE, yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=140))


def link_repository(folder: Path, made: Artifact) -> None:
    """Points `model_repository` of the run at the repository in an artifact, in one atomic step."""
    link, temporary = folder / REPOSITORY, folder / f".{REPOSITORY}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path("stages") / made.path.name / REPOSITORY)
    temporary.replace(link)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run folder for this process alone; the lock goes with the process, however it ends.

    Raises:
        InputError: Another process holds it, or it is not a run folder.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: a file; the run folder has to be a folder or not to exist yet (--out DIR)")
    if folder.exists() and any(folder.iterdir()) and not (folder / ".lock").exists():
        raise InputError(f"{folder}: not empty and not a run folder; give another one with --out DIR")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "another one"
            raise InputError(f"{folder}: process {holder} is writing to it; wait for it, or give another --out DIR") from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def sweep(folder: Path) -> None:
    """Removes what a killed run left half-written; the checkpoints inside a stage stay."""
    for leftover in [*folder.glob("stages/.*.tmp"), *folder.glob("stages/.*.old"), *folder.glob(".*.tmp")]:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
