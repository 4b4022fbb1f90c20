"""A stand-in for the package wandb, which keeps what it is given: the import of wandb alone takes a second."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Artifact:
    name: str
    type: str
    files: dict[str, Path] = field(default_factory=dict)

    def add_file(self, local_path: str, name: str, *, policy: str) -> None:
        assert policy == "immutable", "a copy would go to the user's data folder"
        assert Path(local_path).is_absolute(), "wandb sync may run in another folder"
        self.files[name] = Path(local_path)


@dataclass
class Session:
    arguments: dict[str, Any]
    dir: str
    summary: dict[str, object] = field(default_factory=dict)
    artifacts: list[Artifact] = field(default_factory=list)
    exit_code: int | None = None

    def log_artifact(self, artifact: Artifact) -> None:
        self.artifacts.append(artifact)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@dataclass
class StandIn:
    """The module."""

    sessions: list[Session] = field(default_factory=list)
    torn_down: int = 0
    away: bool = False
    __spec__ = None
    Artifact = Artifact
    Error = type("Error", (Exception,), {})

    def init(self, **arguments: Any) -> Session:
        if self.away:
            raise self.Error("the server is away")
        place = Path(arguments["dir"]) / "wandb" / f"offline-run-{len(self.sessions)}-{arguments['id']}" / "files"
        place.mkdir(parents=True)
        self.sessions.append(Session(arguments, str(place)))
        return self.sessions[-1]

    def teardown(self) -> None:
        self.torn_down += 1


def install(patch: pytest.MonkeyPatch) -> StandIn:
    """Puts a stand-in in the place of the package for a test; it is installed, and its mode is the default."""
    module = StandIn()
    patch.setitem(sys.modules, "wandb", module)
    find_spec = importlib.util.find_spec
    patch.setattr("importlib.util.find_spec", lambda name, *more: module if name == "wandb" else find_spec(name, *more))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        patch.delenv(name, raising=False)
    return module
