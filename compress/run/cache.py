"""The cache of a run: the key of each artifact, the check that a cached artifact is intact, and why none could be used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compress.artifacts import artifact, chain
from compress.artifacts.artifact import Artifact
from compress.core.shown import shown
from compress.stage.context import Context
from compress.stage.stage import Stage

DEPENDS_ON = "depends_on"
"""The entry of a manifest with everything that the artifact depends on."""
INHERITED = frozenset({"parent", "teachers", "checkpoints"})
"""What differs because an earlier step does."""
MOST_DIFFERENCES = 3
ABSENT = object()
DIGEST = re.compile("[0-9a-f]{64}")


def cache_key(step: Stage, parent: Artifact | None, context: Context) -> str:
    """Returns the digest of everything that the output of a step depends on."""
    return artifact.digest(depends_on(step, parent, context))


def depends_on(step: Stage, parent: Artifact | None, context: Context) -> dict[str, Any]:
    """Returns everything that the output of a step depends on: JSON types.

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
    return contents


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


def unlike(step: Stage, stages: Path, wanted: Mapping[str, Any]) -> str | None:
    """Returns in one line how the nearest artifact of a step differs from the one that is wanted.

    Args:
        step: The step, whose artifact is not there.
        stages: The folder of the artifacts.
        wanted: What `depends_on` returns.

    Returns:
        None if the step has no other artifact, or an earlier step is why: that one has said so.
    """
    wanted, nearest = json.loads(json.dumps(wanted)), None  # as it is in a manifest: lists instead of tuples
    for folder in sorted(stages.glob(f"{step.id}-*")):
        try:
            known = artifact.load(folder)
        except artifact.DamagedArtifact:  # one that is being written, or is no longer used
            continue
        if known.id == step.id and DEPENDS_ON in known.manifest:
            found = list(_differences(known.manifest[DEPENDS_ON], wanted))
            if nearest is None or len(found) < len(nearest[0]):
                nearest = found, folder.name
    if nearest is None or not nearest[0] or any(line.partition(" ")[0].partition(".")[0] in INHERITED for line in nearest[0]):
        return None
    more = len(nearest[0]) - MOST_DIFFERENCES
    return f"unlike {nearest[1]}: {'; '.join(nearest[0][:MOST_DIFFERENCES])}{f'; and {more} more' if more > 0 else ''}"


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yields a line for each value that differs, such as `config.epochs 5, was 3`."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key, ABSENT), now.get(key, ABSENT), f"{path}.{key}" if path else key)
    elif before != now:
        digests = all(isinstance(value, str) and DIGEST.fullmatch(value) for value in (before, now))
        yield f"{path} has other contents" if digests else f"{path} {_told(now)}, was {_told(before)}"


def _told(value: Any) -> str:
    return "absent" if value is ABSENT else value if isinstance(value, str) else shown(value)


def _forged(destination: Path) -> list[str]:
    """Returns one line if the manifest is not the one that the last finished run recorded."""
    file, folder = destination / artifact.MANIFEST, destination.parent.parent
    expected = chain.recorded(folder, file.relative_to(folder).as_posix())
    same = expected is None or expected == artifact.file_digest(file)
    return [] if same else [f"{file}: was changed after the run had finished"]
