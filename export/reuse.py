"""Float builds that an earlier export of the same store has made: the candidates of a search and a run with other settings take them.

    stages/build-<key>/<name>/     the folder of the build: hard links, where there are such
    stages/build-<key>/entry.json  its entry of export.json
    stages/build-<key>/answers     what its engines answered to the trial rows, float32, where the float part of int8 is chosen by them

The key is a digest of everything that a build depends on: checkpoint, data, target, settings, libraries and machine. Every file is hashed
before it is taken; a build of which one was changed is made again, and so is every build of an export that is forced.

Left out: quantized builds, which are what differs, models that generate, several towers, and engines of other devices than the CPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from export.builds import Build, Request, has_half_graphs
from foundation.artifacts.artifact import DamagedArtifact, digest, load, read_json, seal, verify, write_json, writing
from foundation.artifacts.store import holding
from foundation.core.arrays import Array
from foundation.stage.context import Context

ENTRY, ANSWERS = "entry.json", "answers"


@dataclass(frozen=True)
class Reuse:
    """Makes builds, or takes them from an earlier export."""

    context: Context
    out: Path
    """Where the folders of the builds go."""
    answers: MutableMapping[Request, Array]
    """What engines answered to the trial rows so far; added to."""
    settings: Any
    """Version and settings of the stage, JSON types."""
    taken: list[str] = field(default_factory=list)
    """Names of the builds that were taken; added to."""

    def entry(self, build: Build, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the entry of export.json of a build, whose folder is there then.

        Args:
            build: The build.
            make: Makes it.
        """
        if not self._is_reusable(build):
            return make()
        key = self.key(build)
        kept = self._place(key)
        with holding(kept.parents[1], kept.name, self.context.progress.log):
            known = None if self.context.forced else self._taken(kept, build)
            if known is not None:
                self.context.progress.log("    as an earlier export has made it")
                self.taken.append(build.name)
                return known
            entry = make()
            self._keep(kept, key, build, entry)
            return entry

    def keeps(self, build: Build) -> bool:
        """Whether a build is kept, and will be taken unless it was changed."""
        return self._is_reusable(build) and not self.context.forced and self._place(self.key(build)).exists()

    def key(self, build: Build) -> str:
        """Returns the digest of everything that a build depends on."""
        context = self.context
        return digest(
            {
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
        )

    def _place(self, key: str) -> Path:
        """Returns where the build of a key is kept."""
        assert self.context.shared is not None, "nothing is reusable without"
        return self.context.shared / f"build-{key[:16]}"

    def _is_reusable(self, build: Build) -> bool:
        facts, context = self.context.facts, self.context
        plain = not (build.is_quantized or facts.generates or facts.two_towers or has_half_graphs(context))
        return context.shared is not None and context.target.device == "cpu" and plain

    def _taken(self, kept: Path, build: Build) -> dict[str, Any] | None:
        """Links the folder of a kept build and returns its entry; None where there is none, or with a warning where it was changed."""
        if not kept.exists():
            return None
        try:
            problems = verify(load(kept))
            entry: dict[str, Any] = {} if problems else read_json(kept / ENTRY)
        except DamagedArtifact as error:
            problems = [error.problem]
        if problems:
            self.context.progress.warn(f"{problems[0]}; {build.name} is made again")
            return None
        shutil.copytree(kept / build.name, self.out / build.name, copy_function=_linked)
        for file in sorted((kept / ANSWERS).glob("*.npy")):
            engine, rest = file.stem.split(".")
            self.answers[engine, build.variant, build.precision, rest] = np.load(file)
        return entry

    def _keep(self, kept: Path, key: str, build: Build, entry: Mapping[str, Any]) -> None:
        """Keeps a build that was made."""
        mine = {asked: found for asked, found in self.answers.items() if asked[1:3] == (build.variant, build.precision)}
        with writing(kept) as folder:
            shutil.copytree(self.out / build.name, folder / build.name, copy_function=_linked)
            write_json(folder / ENTRY, entry)
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
