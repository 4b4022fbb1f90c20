"""Notes of a run folder, one file for each place that the run is sent to: which run it is there, and what the place has of it.

    track.json         MLflow
    track-wandb.json   Weights & Biases

The files are no part of the chain of the run: they change no digest of it. `compress track` and the next `compress run` send what is
missing.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError

from compress.track.names import settings
from compress.track_settings import Track
from foundation.artifacts import artifact
from foundation.artifacts.artifact import DamagedArtifact
from foundation.core.errors import InputError
from foundation.core.shown import reason

SCHEMA = 1
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
"""Statuses of runs in MLflow."""


class Tracked(BaseModel):
    """The run, or one of its steps, and what of it the server has."""

    id: str | None = None
    """Id of the run of the server; None: not created yet."""
    started_ms: int
    """Milliseconds since 1970."""
    ended_ms: int | None = None
    status: Status = "RUNNING"
    sent: Status | None = None
    """The status that the server has."""
    settings: dict[str, str] = Field(default_factory=dict)
    numbers: dict[str, float] = Field(default_factory=dict)
    described: bool = False
    """Whether the server has settings and numbers."""

    def ends(self, status: Status, at_ms: int) -> None:
        """Notes how and when it ended."""
        self.status, self.ended_ms = status, at_ms

    def forget(self) -> None:
        """Forgets its run of the server, so that a new one is created."""
        self.id, self.sent, self.described = None, None, False


class Note(BaseModel, ABC):
    """What the run came to, and what of it a place has."""

    FILE: ClassVar[str]

    schema_: int = Field(SCHEMA, alias="schema")
    model: bool = True
    """Whether the served model is sent."""
    recipe: str
    """Digest of the recipe without `track`: settings of a run of MLflow cannot change, so another recipe is another run."""
    name: str
    """Name of the run."""
    run: Tracked
    steps: dict[str, Tracked] = Field(default_factory=dict)
    """The steps by id."""
    report: str | None = None
    """sha256 of the report.json that the place has."""
    served: str | None = None
    """Digest of the served model that the place has."""

    @classmethod
    def new(cls, plain: Mapping[str, object], track: Track) -> Self:
        """Returns the note of a run that the place does not know.

        Args:
            plain: The recipe as plain data, without `track`.
            track: Where it is tracked; a note has the keys of its place.
        """
        place = {name: value for name, value in track if name in cls.model_fields}
        run = Tracked(started_ms=now_ms(), settings=settings(plain))
        return cls.model_validate({**place, "recipe": artifact.digest(plain), "name": str(plain["name"]), "run": run})

    def end_all(self, status: Status, at_ms: int) -> None:
        """Notes that the run failed or was stopped, and so did the step that it was in."""
        for tracked in self.steps.values():
            if tracked.status == "RUNNING":
                tracked.ends(status, at_ms)
        self.run.ends(status, at_ms)

    def forget(self) -> None:
        """Forgets everything that the place had."""
        for tracked in (self.run, *self.steps.values()):
            tracked.forget()
        self.report = self.served = None

    @property
    @abstractmethod
    def place(self) -> tuple[str, ...]:
        """Where the run is sent to."""


class MlflowNote(Note):
    """The contents of track.json."""

    FILE: ClassVar[str] = "track.json"

    mlflow: str
    """URI of the server."""
    experiment: str

    @property
    def place(self) -> tuple[str, ...]:
        """Server and experiment."""
        return self.mlflow, self.experiment


class WandbNote(Note):
    """The contents of track-wandb.json."""

    FILE: ClassVar[str] = "track-wandb.json"

    wandb: str
    """PROJECT or ENTITY/PROJECT."""

    @property
    def place(self) -> tuple[str, ...]:
        """The project."""
        return (self.wandb,)


N = TypeVar("N", bound=Note)


def resumed(note: N, folder: Path) -> N:
    """Returns the note that continues the run of a folder: of the same recipe, sent to the same place. Otherwise the new note.

    Args:
        note: Of a run that no place has.
        folder: The run folder.
    """
    known = read_note(folder, type(note))
    if known is None or (known.place, known.recipe) != (note.place, note.recipe):
        return note
    known.run.status, known.run.ended_ms, known.model = "RUNNING", None, note.model
    return known


def read_note(folder: Path, kind: type[N]) -> N | None:
    """Returns the note of a run folder for one kind of place; None if the run was never sent to one.

    Raises:
        InputError: The file is damaged.
    """
    file = folder / kind.FILE
    if not file.exists():
        return None
    try:
        return kind.model_validate(artifact.read_json(file))
    except (DamagedArtifact, ValidationError) as error:
        remedy = "remove the file: the run is then tracked as a new one"
        raise InputError(f"{file}", f"damaged ({reason(error)})", remedy=remedy) from error


def write_note(folder: Path, note: Note) -> None:
    """Writes a note of a run folder."""
    artifact.write_json(folder / note.FILE, note.model_dump(mode="json", by_alias=True))


def now_ms() -> int:
    """Returns the milliseconds since 1970."""
    return int(time.time() * 1000)
