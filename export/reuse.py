"""Reuses float builds of earlier exports in the same store, for the candidates of a search and for runs with other settings.

    stages/build-<key>/<name>/     the folder of the build: hard links, if the file system has them
    stages/build-<key>/entry.json  its entry of export.json
    stages/build-<key>/answers     what its engines answered to the trial rows, float32, where the float part of int8 is chosen by them

The key is a digest of everything that a build depends on: checkpoint, data, target, settings, libraries and machine. Every file is hashed
before it is reused. If one was changed, the build is repeated; a forced export repeats every build.

Left out: quantized builds, which differ between candidates, models that generate, several towers, and engines of other devices than the
CPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from export.builds import Build, Request, has_half_graphs
from foundation.artifacts import exported
from foundation.artifacts.artifact import DamagedArtifact, digest, load, seal, verify, write_json, writing
from foundation.artifacts.document import read
from foundation.artifacts.store import BUILD, holding
from foundation.core.arrays import Array
from foundation.core.json_value import Json
from foundation.stage.context import Context

if TYPE_CHECKING:
    from export.exporter import Exporter

ENTRY, ANSWERS = "entry.json", "answers"


@dataclass(frozen=True)
class Reuse:
    """Makes builds, or reuses them from an earlier export."""

    context: Context
    out: Path
    """Parent of the folders of the builds."""
    answers: MutableMapping[Request, Array]
    """Answers of engines to the trial rows so far; new ones are added."""
    settings: Json
    """Version and settings of the stage."""
    taken: list[str] = field(default_factory=list)
    """Names of the reused builds; new ones are appended."""

    def entry(self, build: Build, make: Callable[[], Exporter]) -> exported.Build:
        """Returns the entry of export.json of a build, and makes sure that its folder exists.

        Args:
            build: The build.
            make: Opens what makes it.
        """
        if not self._is_reusable(build):
            return make().run()
        key = self.key(build)
        stored = self._place(key)
        with holding(stored.parents[1], stored.name, self.context.progress.log):
            known = None if self.context.forced else self._taken(stored, build)
            if known is not None:
                self.context.progress.log("    reused from an earlier export")
                self.taken.append(build.name)
                return known
            entry = make().run()
            self._keep(stored, key, build, entry)
            return entry

    def keeps(self, build: Build) -> bool:
        """Whether a build is in the store, and will be reused unless it was changed."""
        return self._is_reusable(build) and not self.context.forced and self._place(self.key(build)).exists()

    def key(self, build: Build) -> str:
        """Returns the digest of everything that a build depends on."""
        context = self.context
        parts: dict[str, object] = {
            "settings": self.settings,
            "build": [build.variant, build.precision, build.floating],
            "checkpoint": context.checkpoints[build.variant].digest,
            "task": context.task,
            "seed": context.seed,
            "data": [context.data.digest, context.data.judge],
            "rows": [context.max_length, context.stride, context.aggregate],
            "target": [context.target.model_dump(mode="json", exclude={"serve"}), context.target.num_threads],
            "machine": dict(context.fingerprint),
        }
        return digest(parts)

    def _place(self, key: str) -> Path:
        """Returns the place of a build in the store."""
        assert self.context.shared is not None, "builds are reusable only in a shared store"
        return self.context.shared / f"{BUILD}{key[:16]}"

    def _is_reusable(self, build: Build) -> bool:
        facts, context = self.context.facts, self.context
        plain = not (build.is_quantized or facts.generates or facts.two_towers or has_half_graphs(context))
        return context.shared is not None and context.target.device == "cpu" and plain

    def _taken(self, cached: Path, build: Build) -> exported.Build | None:
        """Links the folder of a stored build and returns its entry; None if there is none, or, with a warning, if it was changed."""
        if not cached.exists():
            return None
        try:
            problems = verify(load(cached))
            entry = None if problems else read(exported.Build, cached / ENTRY)
        except DamagedArtifact as error:
            problems, entry = [error.problem], None
        if entry is None:
            self.context.progress.warn(f"{problems[0]}; {build.name} is made again")
            return None
        shutil.copytree(cached / build.name, self.out / build.name, copy_function=_linked)
        for file in sorted((cached / ANSWERS).glob("*.npy")):
            engine, rest = file.stem.split(".")
            self.answers[engine, build.variant, build.precision, rest] = np.load(file)
        return entry

    def _keep(self, cached: Path, key: str, build: Build, entry: exported.Build) -> None:
        """Stores a new build."""
        mine = {asked: found for asked, found in self.answers.items() if asked[1:3] == (build.variant, build.precision)}
        with writing(cached) as folder:
            shutil.copytree(self.out / build.name, folder / build.name, copy_function=_linked)
            write_json(folder / ENTRY, entry.written())
            for (engine, _, _, rest), found in mine.items():
                (folder / ANSWERS).mkdir(exist_ok=True)
                np.save(folder / ANSWERS / f"{engine}.{rest}.npy", found)
            seal(folder, id=build.name, kind="engine", key=key, parents=[], fields={})


def _linked(source: str, destination: str) -> None:
    """Links a file, or copies it where the file system has no hard links."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
