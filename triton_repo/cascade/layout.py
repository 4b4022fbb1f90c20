"""Writes a certified cascade as one model of the CPU repository.

    model_repository/
      cascade/
        config.pbtxt
        1/  __init__.py  model.py  tiers.py  watch.py  metrics.py  confidence.py  e_process.py  cascade.json
            preprocess.json  tokenizer.json     of the first tier, for whoever reads the repository
            warm_up/<bucket>.TEXT               one synthetic row for each bucket, which each tier answers before the model is ready
            tier-1/  tier-2/  ...               each what `triton_repo.layout` writes for a model that is served alone

The tiers, their engines, scores and thresholds are those of the certificate. So a tier gives the answers that were certified.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.artifacts.artifact import Artifact
from foundation.artifacts.cascade import Cascade
from foundation.artifacts.document import read
from foundation.artifacts.exported import Exported
from foundation.core.engines import ENGINES, served_on
from foundation.core.errors import InputError
from foundation.standalone import confidence, e_process
from triton_repo.cascade import served
from triton_repo.cascade.settings import Audit
from triton_repo.config import ModelSettings, Scheduling, model_config, to_text
from triton_repo.layout import EXPORTED, SHORT, VERSION, Served, served_build, settings_of, warm_up_rows, write_version

NAME, DOCUMENT, WARM_UP = "cascade", "cascade.json", "warm_up"
FILES = ("__init__.py", "model.py", "tiers.py", "watch.py", "metrics.py")
STANDALONE = (confidence, e_process)
TAGS, FIRST = "tags", "entities"
"""The form of answers that are tags, as scores name it, and the response that reads the tags that were certified."""


@dataclass(frozen=True)
class ServedCascade:
    """A cascade, and the models that its tiers would be alone."""

    document: Cascade
    tiers: tuple[Served, ...]

    @property
    def form(self) -> str:
        """Form of the answers: class, set, tags, value or vector."""
        return next(tier.score.form for tier in self.document.tiers if tier.score is not None)


def cascade_of(exported: Artifact, document: Cascade) -> ServedCascade:
    """Returns a cascade with its tiers among the builds of an export.

    Args:
        exported: The artifact of `export`.
        document: Contents of cascade.json.

    Raises:
        InputError: A tier is no engine of this export that the CPU repository serves, tiers have different labels, or their tags are not
            those that were certified.
    """
    engines = {build.key(entry): (build, entry) for build in read(Exported, exported.path / EXPORTED).builds for entry in build.engines}
    tiers = []
    for tier in document.tiers:
        build, entry = engines.get(tier.key, (None, None))
        if build is None or entry is None or not entry.runnable or entry.engine not in served_on("cpu"):
            raise InputError(
                "stages.cascade.tiers",
                f"tier {tier.number} is {tier.variant} in {tier.precision} on {tier.engine} ({tier.mode}), which is not served here",
                f"the CPU model repository serves {', '.join(served_on('cpu'))}",
                "run the stage cascade again, or leave out triton_repo",
            )
        tiers.append(served_build(exported.path, build, entry))
    names = {tier.prepared.labels for tier in tiers}
    if len(names) > 1:
        remedy = "give tiers with the same labels in the same order"
        raise InputError("stages.cascade.tiers", f"{len(names)} different lists of labels", remedy=remedy)
    found = ServedCascade(document, tuple(tiers))
    if found.form == TAGS:
        _check_tags(found)
    return found


def _check_tags(cascade: ServedCascade) -> None:
    """Raises where the words of a text would have other tokens in another tier, or entities would not be read from their first tokens."""
    prepared = [tier.prepared for tier in cascade.tiers]
    if len({(str(one.tokenizer and one.tokenizer.to_str()), one.max_length, one.buckets) for one in prepared}) > 1:
        given = "tiers with different tokenizers or lengths given, and the answer is put together from tokens"
        raise InputError("stages.cascade.tiers", given, "one tokenizer and one list of lengths is allowed", "leave that tier out")
    if prepared[0].response != FIRST:
        given = f"{prepared[0].response} given, and the tags of the first tokens of words were certified"
        raise InputError("stages.cascade", given, f"{FIRST} is allowed", "leave out the stage")


def write_cascade(
    out: Path,
    cascade: ServedCascade,
    audit: Audit,
    *,
    pairs: bool,
    batch_sizes: Sequence[int],
    max_batch_size: int,
    scheduling: Scheduling,
) -> ModelSettings:
    """Writes the model into a repository, and its row into the README if there is one.

    Args:
        out: The repository; created.
        cascade: The cascade.
        audit: How it is watched.
        pairs: Whether rows are pairs of texts.
        batch_sizes: Batch sizes of static engines; 1 is added.
        max_batch_size: Maximum batch size.
        scheduling: How requests come to it.

    Returns:
        The settings of the model.
    """
    first = cascade.tiers[0]
    rows = dict(warm_up_rows(first.prepared, pairs))
    own = [settings_of(tier, pairs, batch_sizes, max_batch_size, scheduling, ()) for tier in cascade.tiers]
    settings = replace(own[0], name=NAME, is_cascade=True)
    version = out / NAME / VERSION
    version.mkdir(parents=True)
    (out / NAME / "config.pbtxt").write_text(to_text(model_config(settings)), encoding="utf-8")
    for name in FILES:
        shutil.copyfile(Path(next(iter(served.__path__)), name), version / name)
    for module in STANDALONE:
        shutil.copyfile(str(module.__file__), version / Path(str(module.__file__)).name)
    first.prepared.save(version)
    for number, (tier, about) in enumerate(zip(cascade.tiers, own, strict=True), 1):
        write_version(version / folder_of(number), tier, tier.prepared, about)
    (version / WARM_UP).mkdir()
    for name, row in rows.items():
        for column in settings.inputs:
            (version / WARM_UP / f"{name}.{column}").write_bytes(SHORT.get(column, row))
    contents = served_document(cascade, audit, scheduling.instances, tuple(rows))
    (version / DOCUMENT).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    _describe(out / "README.md", cascade, settings)
    return settings


def folder_of(tier: int) -> str:
    """Returns the folder of a tier in the version; the first tier is 1."""
    return f"tier-{tier}"


def served_document(cascade: ServedCascade, audit: Audit, instances: int, warm_up: tuple[str, ...]) -> dict[str, object]:
    """Returns what the served model reads.

    Args:
        cascade: The cascade.
        audit: How it is watched.
        instances: Processes of the model, each of which watches its own rows.
        warm_up: Names of the warm-up rows.
    """
    document = cascade.document
    tiers = [
        {"folder": folder_of(number), "score": None if tier.score is None else {**tier.score.score}, "threshold": tier.threshold}
        for number, tier in enumerate(document.tiers, 1)
    ]
    watch = {
        "escalation": [one.upper for one in document.escalation],
        "disagreement": document.certificate.bound,
        "form": cascade.form,
        "limit": document.certificate.distance,
        "audit": audit.share,
        "false_alarm": audit.false_alarm,
        "instances": instances,
    }
    return {"tiers": tiers, "watch": watch, "warm_up": list(warm_up)}


def _describe(readme: Path, cascade: ServedCascade, settings: ModelSettings) -> None:
    """Adds a paragraph to the README of the repository, where the stage has written one."""
    if not readme.exists():
        return
    names = ", then ".join(
        f"{tier.variant} in {tier.precision} ({ENGINES[tier.engine].title}, {tier.mode})" for tier in cascade.document.tiers
    )
    bound, certainty = cascade.document.certificate.bound, cascade.document.certificate.confidence
    with readme.open("a", encoding="utf-8") as stream:
        stream.write(_README.format(name=settings.name, names=names, bound=100 * bound, certainty=100 * certainty))


_README = """
`{name}` (serve this one) has several tiers: {names}. A tier answers what it is sure of, and the next one the rest.
Its further output `TIER` (int32 [n, 1]) is the number of the tier that answered. At most {bound:g} % of its answers are other ones
than the original model's, with a confidence of {certainty:g} %, for rows like those that it was certified on. Its metrics
(`compress_cascade_*`) say when that is refuted.
"""
