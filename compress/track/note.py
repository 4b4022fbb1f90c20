"""`track.json` of a run folder: which run of the tracking server this run is, and what of it the server has.

The file is no part of the chain of the run: it changes no digest of it. `compress track` and the next `compress run` send what is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from foundation.artifacts import artifact
from foundation.artifacts.artifact import DamagedArtifact
from foundation.core.errors import InputError
from foundation.core.shown import reason

FILE, SCHEMA = "track.json", 1
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


class Note(BaseModel):
    """The contents of track.json."""

    schema_: int = Field(SCHEMA, alias="schema")
    mlflow: str
    """URI of the server."""
    experiment: str
    model: bool = True
    """Whether the served model is sent."""
    recipe: str
    """Digest of the recipe without `track`: settings of a run of MLflow cannot change, so another recipe is another run."""
    name: str
    """Name of the run."""
    run: Tracked
    steps: dict[str, Tracked] = Field(default_factory=dict)
    """The steps by id: nested runs."""
    report: str | None = None
    """sha256 of the report.json that the server has."""
    served: str | None = None
    """Digest of the served model that the server has."""

    def end_all(self, status: Status, at_ms: int) -> None:
        """Notes that the run failed or was stopped, and so did the step that it was in."""
        for tracked in self.steps.values():
            if tracked.status == "RUNNING":
                tracked.ends(status, at_ms)
        self.run.ends(status, at_ms)

    def forget(self) -> None:
        """Forgets everything that the server had."""
        for tracked in (self.run, *self.steps.values()):
            tracked.forget()
        self.report = self.served = None


def read_note(folder: Path) -> Note | None:
    """Returns the note of a run folder; None if the run was never tracked.

    Raises:
        InputError: The file is damaged.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        return Note.model_validate(artifact.read_json(file))
    except (DamagedArtifact, ValidationError) as error:
        remedy = "remove the file: the run is then tracked as a new one"
        raise InputError(f"{file}", f"damaged ({reason(error)})", remedy=remedy) from error


def write_note(folder: Path, note: Note) -> None:
    """Writes the note of a run folder."""
    artifact.write_json(folder / FILE, note.model_dump(mode="json", by_alias=True))
