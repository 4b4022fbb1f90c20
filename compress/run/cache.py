"""The cache of a run: the key of each artifact, and the check that a cached artifact is intact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.artifacts import artifact, chain
from compress.artifacts.artifact import Artifact
from compress.stage.context import Context
from compress.stage.stage import Stage


def cache_key(step: Stage, parent: Artifact | None, context: Context) -> str:
    """Returns the digest of everything that the output of a step depends on.

    Checkpoints depend on the inputs of training; everything that is built or measured also depends on the target, the library versions
    and the hardware. The name of the run and the goals are not part of the key.
    """
    contents: dict[str, Any] = {
        "stage": step.NAME,
        "version": step.VERSION,
        "config": step.model_dump(mode="json", exclude={"input"}),  # covered by the parent
        "depends": step.depends(context),
        "parent": parent.digest if parent else None,
        "teachers": [teacher.digest for teacher in context.teachers],
        "task": context.task,
        "seed": context.seed,
        "data": context.data.digest,
        "max_length": context.max_length,
        "threads": context.target.num_threads,
    }
    if context.parallel.gradients != "float32" and step.team(context.team).size > 1:
        contents["gradients"] = [context.parallel.gradients, context.parallel.powersgd_rank]
    if context.stride:
        contents["stride"] = context.stride
    if context.aggregate:
        contents["aggregate"] = context.aggregate
    if step.PRODUCES != "checkpoint":
        contents |= {"target": context.target.model_dump(mode="json", exclude={"serve"}), **context.fingerprint}  # read by what asks for it
        if context.data.judge != "evaluation":
            contents["judge"] = context.data.judge
    if step.PRODUCES not in ("checkpoint", "evaluation"):  # these read every variant
        contents["checkpoints"] = {name: checkpoint.digest for name, checkpoint in context.checkpoints.items()}
    return artifact.digest(contents)


def find(destination: Path, key: str, context: Context) -> Artifact | None:
    """Returns the artifact in a folder if it has this key and all its hashes match; None if the step has to run."""
    if not destination.exists():
        return None
    try:
        found = artifact.load(destination)
        problems = [*artifact.verify(found), *_forged(destination)]
    except artifact.DamagedArtifact as error:
        problems = [str(error)]
    if problems:
        context.progress.warn(f"{destination.name}: damaged, so the step runs again: {'; '.join(problems)}")
        return None
    return found if found.key == key else None


def _forged(destination: Path) -> list[str]:
    """Returns one line if the manifest is not the one that the last finished run recorded."""
    file, folder = destination / artifact.MANIFEST, destination.parent.parent
    expected = chain.recorded(folder, file.relative_to(folder).as_posix())
    same = expected is None or expected == artifact.file_digest(file)
    return [] if same else [f"{file}: was changed after the run had finished"]
