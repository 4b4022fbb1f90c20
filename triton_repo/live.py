"""The repository that a running server reads: a copy in its temporary folder, whose versions come and go.

    live/
      routes.json                     what the front reads: for each model its version, the limits of its queue and of a request
      <model>/
        config.pbtxt                  as in the repository, with the version to load
        warmup/  1/  2/ ...           copies; of a language model links, since its weights may be large
          machine.json                where the version keeps its compiled networks (`triton_repo.blobs`)
      <model>.<random>/               a candidate: the next version of a model, until it has been checked; its files are links

Nothing is written into a run or a deployment, and what happens to its files later does not touch the server, nor a restart of it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from foundation.core.json_value import Json
from triton_repo.blobs import BlobCache
from triton_repo.config import from_text, model_names, to_text
from triton_repo.generation.config import request_seconds
from triton_repo.queueing import read_policy

CONFIG, ROUTES, MACHINE = "config.pbtxt", "routes.json", "machine.json"
ENGINE, KEPT = "engine.py", "KEPT_NETWORKS"
"""The file of a version that runs its network, and the property that names the folder of compiled ones."""
KEPT_HERE = "networks"
"""Link in a version to that folder."""
NETWORK, POLICY = "openvino.xml", "default_queue_policy"


@dataclass(frozen=True)
class Candidate:
    """The next version of a model, which Triton can load under a name of its own, beside the model."""

    name: str
    """Its name in Triton; no client guesses it."""
    model: str
    source: Path
    """Its folder in the repository that it comes from."""
    version: str
    """The version that it becomes."""


class LiveRepository:
    """A copy of a model repository.

    Args:
        folder: New folder to write.
        repository: The repository to copy.
        blobs: Where compiled networks are kept; None: nowhere.
        models: The models to copy: what they are called, and their folders; None: all, called as their folders.
    """

    def __init__(self, folder: Path, repository: Path, blobs: BlobCache | None = None, models: Mapping[str, str] | None = None) -> None:
        self.folder, self._routes, self._blobs = folder, dict[str, dict[str, Json]](), blobs
        folder.mkdir()
        for name, given in ({name: name for name in model_names(repository)} if models is None else models).items():
            (folder / name).mkdir()
            config = self._config_of(repository / given)
            self._copy_rest(name, repository / given)
            version = max(_versions(repository / given))
            self._copy(repository / given / version, folder / name / version, config)
            self._write(name, config, version)
            self._note(name, config, version)
        self._publish()

    @property
    def routes_file(self) -> Path:
        """The file that the front reads."""
        return self.folder / ROUTES

    @property
    def names(self) -> list[str]:
        """Names of the models, sorted."""
        return sorted(self._routes)

    def version(self, name: str) -> str:
        """Returns the version of a model that answers."""
        return str(self._routes[name]["version"])

    def config(self, name: str) -> pb.ModelConfig:
        """Returns the `ModelConfig` of a model."""
        return self._config_of(self.folder / name)

    def stage(self, name: str, source: Path) -> Candidate:
        """Copies the model folder `source` next to the present version of a model, to be loaded and checked as a model of its own.

        Triton limits no queue of it, so that the check is not refused.
        """
        version = str(int(self.version(name)) + 1)
        candidate = Candidate(f"{name}.{secrets.token_hex(8)}", name, source, version)
        config = self._config_of(source)
        config.dynamic_batching.ClearField(POLICY)
        self._copy(source / max(_versions(source)), self.folder / name / version, config)
        staged = self.folder / candidate.name
        staged.mkdir()
        (staged / version).symlink_to(self.folder / name / version)
        self._copy_rest(candidate.name, source)
        self._write(candidate.name, config, version)
        return candidate

    def unstage(self, candidate: Candidate) -> None:
        """Deletes the folder of a candidate that is no longer loaded; its version stays."""
        shutil.rmtree(self.folder / candidate.name)

    def take(self, candidate: Candidate, config: pb.ModelConfig) -> None:
        """Sets the version of a candidate as the one to load of its model, with this configuration."""
        self._copy_rest(candidate.model, candidate.source)
        self.keep(candidate.model, candidate.version, config)

    def keep(self, name: str, version: str, config: pb.ModelConfig) -> None:
        """Sets this version of a model as the one to load, with this configuration."""
        self._write(name, config, version)

    def route(self, name: str, version: str, config: pb.ModelConfig) -> None:
        """Notes that this version answers from now on; the front then applies the limits of this configuration."""
        self._note(name, config, version)
        self._publish()

    def remove(self, name: str, version: str) -> None:
        """Deletes a version that is no longer loaded."""
        place = self.folder / name / version
        place.unlink() if place.is_symlink() else shutil.rmtree(place, ignore_errors=True)

    def _config_of(self, model: Path) -> pb.ModelConfig:
        return from_text((model / CONFIG).read_text(encoding="utf-8"))

    def _copy(self, source: Path, out: Path, config: pb.ModelConfig) -> None:
        if config.model_transaction_policy.decoupled:
            out.symlink_to(source.absolute())
            return
        shutil.copytree(source, out)
        for folder in sorted(file.parent for file in out.rglob(NETWORK)):  # a cascade has a network for each tier
            if self._blobs is not None and KEPT in (folder / ENGINE).read_text(encoding="utf-8"):
                kept = self._blobs.open(folder)  # older engines keep none
                (folder / KEPT_HERE).symlink_to(kept.absolute())  # its own path may have letters that the server's Python does not know
                (folder / MACHINE).write_text(json.dumps({KEPT: str(folder / KEPT_HERE)}), encoding="utf-8")

    def _copy_rest(self, name: str, source: Path) -> None:
        """Copies what belongs to no version, such as warm-up rows."""
        for entry in source.iterdir():
            if entry.name != CONFIG and not entry.name.isdigit():
                place = self.folder / name / entry.name
                shutil.copytree(entry, place, dirs_exist_ok=True) if entry.is_dir() else shutil.copy(entry, place)

    def _write(self, name: str, config: pb.ModelConfig, version: str) -> None:
        config.name = name  # Triton identifies a model only by the name of its folder
        config.version_policy.specific.versions[:] = [int(version)]
        _replace(self.folder / name / CONFIG, to_text(config))

    def _note(self, name: str, config: pb.ModelConfig, version: str) -> None:
        limits = {**read_policy(config).model_dump(), "request_seconds": request_seconds(config), "max_rows": max(1, config.max_batch_size)}
        self._routes[name] = {"version": version, **limits}

    def _publish(self) -> None:
        _replace(self.routes_file, json.dumps(self._routes))


def without_limits(repository: Path, out: Path) -> Path:
    """Returns a repository of the same models without limits of their queues, so that an evaluation is not refused.

    Args:
        repository: The repository.
        out: Folder to write, anew; its models are links.
    """
    shutil.rmtree(out, ignore_errors=True)
    for name in model_names(repository):
        (out / name).mkdir(parents=True)
        config = from_text((repository / name / CONFIG).read_text(encoding="utf-8"))
        config.dynamic_batching.ClearField(POLICY)
        (out / name / CONFIG).write_text(to_text(config), encoding="utf-8")
        for entry in (repository / name).iterdir():
            if entry.name != CONFIG:
                (out / name / entry.name).symlink_to(entry.absolute())
    return out


def _versions(model: Path) -> list[str]:
    return sorted((entry.name for entry in model.iterdir() if entry.name.isdigit()), key=int)


def _replace(path: Path, text: str) -> None:
    """Writes a file that others read meanwhile."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
