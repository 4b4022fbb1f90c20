"""The cache of a run: the key of each artifact, the check that a cached artifact is intact, and why none could be used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from compress.run.differences import Difference, differences
from foundation.artifacts import artifact, chain
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import Problem
from foundation.core.shown import shown
from foundation.stage.context import Context
from foundation.stage.stage import Stage

DEPENDS_ON = "depends_on"
"""The entry of a manifest with everything that the artifact depends on."""
INHERITED = frozenset({"parent", "teachers", "checkpoints", "cascade"})
"""Inputs that differ because an earlier step does."""
MOST_DIFFERENCES = 3
DIGEST = re.compile("[0-9a-f]{64}")


def cache_key(step: Stage, parent: Artifact | None, context: Context) -> str:
    """Returns the digest of everything that the output of a step depends on."""
    return artifact.digest(depends_on(step, parent, context))


def depends_on(step: Stage, parent: Artifact | None, context: Context) -> dict[str, object]:
    """Returns everything that the output of a step depends on: JSON types.

    Checkpoints depend on the inputs of training; everything that is built or measured also depends on the target, the library versions
    and the hardware. The name of the run and the goals are not part of the key, apart from shapes that goals add to the target.
    """
    contents: dict[str, object] = {
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
    if context.parallel.expert_capacity is not None and step.team(context.team).size > 1:
        contents["expert_capacity"] = [context.parallel.experts, context.parallel.expert_capacity]
    if context.parallel.checkpointing == "int8" and step.PRODUCES == "checkpoint":  # the others change no training
        contents["checkpointing"] = context.parallel.checkpointing
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
        if context.cascade is not None:
            contents["cascade"] = context.cascade.digest
    return contents


def find(destination: Path, key: str, context: Context) -> Artifact | None:
    """Returns the artifact in a folder if it has this key and all its hashes match; None if the step has to run."""
    if not destination.exists():
        return None
    try:
        found = artifact.load(destination)
        problems = [*artifact.verify(found), *_forged(destination)]
    except artifact.DamagedArtifact as error:
        problems = [error.problem]
    if problems:
        context.progress.warn(f"{destination.name}: damaged, so the step runs again: {'; '.join(map(str, problems))}")
        return None
    return found if found.key == key else None


def explain_miss(step: Stage, stages: Path, wanted: Mapping[str, object]) -> str | None:
    """Returns in one line how the nearest artifact of a step differs from the one that is wanted.

    Args:
        step: The step, whose artifact is not there.
        stages: The folder of the artifacts.
        wanted: What `depends_on` returns.

    Returns:
        None if the step has no other artifact, or an earlier step is why: that one has said so.
    """
    wanted = json.loads(json.dumps(wanted))  # as it is in a manifest: lists instead of tuples
    others = {folder: sorted(differences(inputs, wanted)) for folder, inputs in _others(step, stages)}
    if not others:
        return None
    nearest = min(others, key=lambda folder: len(others[folder]))
    found = others[nearest]
    if not found or any(difference.path.partition(".")[0] in INHERITED for difference in found):
        return None
    told = [_in_words(difference) for difference in found[:MOST_DIFFERENCES]]
    told += [f"and {len(found) - MOST_DIFFERENCES} more"] if len(found) > MOST_DIFFERENCES else []
    return f"unlike {nearest}: {'; '.join(told)}"


def _others(step: Stage, stages: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields the folder name of each artifact of a step, and what it depends on."""
    for folder in sorted(stages.glob(f"{step.id}-*")):
        try:
            known = artifact.load(folder)
        except artifact.DamagedArtifact:  # another process is writing it, or nothing uses it any longer
            continue
        if known.id == step.id and "depends_on" in known.manifest:
            yield folder.name, known.manifest["depends_on"]


def _in_words(difference: Difference) -> str:
    """Returns a difference in words, such as `config.epochs 5, was 3`."""
    before, now = (value if isinstance(value, str) else shown(value) for value in (difference.before, difference.now))
    contents = DIGEST.fullmatch(before) and DIGEST.fullmatch(now)
    return f"{difference.path} has other contents" if contents else f"{difference.path} {now}, was {before}"


def _forged(destination: Path) -> list[Problem]:
    """Returns a problem if the manifest is not the one that the last finished run recorded."""
    file, folder = destination / artifact.MANIFEST, destination.parent.parent
    expected = chain.recorded(folder, file.relative_to(folder).as_posix())
    same = expected is None or expected == artifact.file_digest(file)
    return [] if same else [Problem(f"{file}", "was changed after the run had finished")]
