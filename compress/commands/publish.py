"""`compress publish`: a variant of a run as a folder that other programs load, with a model card (`export.folders`).

The folder is written next to its place and renamed, so that it is whole or absent. Nothing is sent anywhere without `--push`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from yaml import YAMLError

from compress.commands.model_card import FILE, UNKNOWN, Origin, Published, card
from compress.recipe import Recipe, check
from compress.report import evaluations
from compress.report.document import Report
from compress.run.opened import opened
from export.folders.source import Source
from export.folders.table import FORMATS
from foundation.artifacts import artifact
from foundation.artifacts.run_folder import Run, check_outside
from foundation.core.errors import InputError, nearest
from foundation.core.named import one_of
from foundation.labels.tasks import TASKS
from foundation.models.adapter_files import adapter_names
from foundation.models.files import is_local
from foundation.models.folder import Checkpoint

LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
"""Ids of the Hub's list of licences look like this."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def publish(
    folder: Path,
    out: Path,
    *,
    variant: str,
    form: str,
    push: str | None = None,
    licence: str | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Writes the folder of one variant.

    Args:
        folder: A finished run; it is never written to.
        out: A new or empty folder outside of it.
        variant: Id of the variant.
        form: A row of `export.folders.table.FORMATS`.
        push: ORG/NAME of a repository of the Hub that the folder is uploaded to; None: nothing is sent.
        licence: Id of the licence on the Hub; None: the base model's, where its card is on this machine.
        log: Prints one line.

    Returns:
        `out`.

    Raises:
        InputError: There is no such variant or format, its files are damaged, the format cannot hold it, the folder is not empty, or the
            Hub refuses it.
    """
    if form not in FORMATS:
        raise InputError(f"--as {form}", "not a format", f"{one_of(list(FORMATS))} is allowed{nearest(form, FORMATS)}")
    if licence is not None and not LICENCE.fullmatch(licence):
        raise InputError("--license", f"{licence} given", "an id of the Hub's list is needed, such as apache-2.0")
    run = opened(folder)
    check_outside(run, out)
    _check_empty(out)
    if push is not None:
        from compress.commands.push import check_target

        check_target(push)
    report, source = Report.load(run.folder).contents, _source(run, variant)
    entry = next((one for one in report.variants if one.id == variant), None)
    if entry is None:
        raise InputError(f"{run.folder}", f"its report has no variant {variant}", remedy="`compress report` writes it again")
    origin = _origin(check(run.recipe), entry.stages, licence)
    with artifact.writing(out.absolute()) as temporary:
        written = FORMATS[form].write(source, temporary)
        published = Published(report, entry, TASKS[source.task], FORMATS[form], written, origin)
        card(published if push is None else replace(published, name=push)).save(temporary / FILE)
        files = artifact.files_below(temporary)
        size_mb = sum(file.stat().st_size for file in files.values()) / 1e6
        _check_empty(out)
    log(f"{out}: {len(files)} files, {size_mb:.1f} MB of {variant} as {form}; see {out / FILE}")
    if origin.licence == UNKNOWN:
        log("warning: the licence of the base model is not known; give it with --license before you share the folder")
    if push is not None:
        from compress.commands.push import upload

        log(upload(out, push, f"{report.name}: {variant} as {form}"))
    return out


def _source(run: Run, variant: str) -> Source:
    """Returns what a folder is written from, after its bytes were hashed.

    Raises:
        InputError: The run has no such variant, or files of it are damaged.
    """
    if variant not in run.variants:
        raise InputError(
            f"--variant {variant}", "not a variant of this run", f"{one_of(list(run.variants))} is allowed{nearest(variant, run.variants)}"
        )
    checkpoint, export = run.variants[variant], run.of_kind("engine")
    if adapter_names(checkpoint.path):
        reason = "it has adapters, which no such folder holds: other programs would answer without them"
        raise InputError(
            f"--variant {variant}", reason, remedy="serve it (`compress serve`, `compress deploy`), or publish the model below"
        )
    problems = [problem for made in (checkpoint, export) if made is not None for problem in artifact.verify(made)]
    if problems:
        raise InputError.of(problem.advise("`compress run` makes what is damaged again") for problem in problems)
    builds = tuple(build for build in evaluations.exported(run).builds if build.variant == variant)
    place = None if export is None else export.path
    return Source(variant, Checkpoint(checkpoint.path), run.recipe["model"]["task"], place, builds)


def _check_empty(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}", "not empty", "nothing is overwritten", "give a new folder")


def _origin(recipe: Recipe, stages: tuple[str, ...], licence: str | None) -> Origin:
    """Returns where a variant comes from: base model, licence, data and steps."""
    path, steps, data = recipe.model.path, tuple(_steps(recipe, stages)), recipe.data.path
    dataset = data if _is_of_hub(data, "dataset") else None
    if path is None:
        return Origin(licence or UNKNOWN, None, "random weights", dataset, steps)
    of_hub = _is_of_hub(path, "model")
    front = _front_matter(path, of_hub)
    named, above = front.get("license"), front.get("base_model")
    known = licence or (named if isinstance(named, str) else UNKNOWN)
    if of_hub:
        return Origin(known, path, f"[{path}](https://huggingface.co/{path})", dataset, steps)
    base = above if isinstance(above, str) else None
    return Origin(known, base, f"the folder `{Path(path).name}`" + (f", made from {base}" if base else ""), dataset, steps)


def _is_of_hub(path: str, kind: str) -> bool:
    """Whether a path of the recipe names a repository of the Hub: it was downloaded to this machine, and is no folder here. A relative path
    of another working folder looks the same otherwise."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return (
        bool(HUB_ID.fullmatch(path)) and not is_local(path) and Path(HF_HUB_CACHE, repo_folder_name(repo_id=path, repo_type=kind)).is_dir()
    )


def _steps(recipe: Recipe, stages: tuple[str, ...]) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Yields id, kind and settings of the stages of a recipe that led to a variant."""
    for stage in recipe.stages:
        if stage.id in stages:
            settings = stage.model_dump(mode="json", exclude_defaults=True)
            yield stage.id, stage.NAME, {key: value for key, value in settings.items() if key not in ("id", "input")}


def _front_matter(path: str, of_hub: bool) -> dict[str, Any]:
    """Returns the front matter of the card of a model, where the card is on this machine; empty where it is not."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.repocard import metadata_load

    file = try_to_load_from_cache(path, FILE) if of_hub else Path(path).expanduser() / FILE
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return {}
    try:
        return metadata_load(file) or {}
    except (ValueError, YAMLError):  # a card of somebody else, whose metadata is no map: it names no licence
        return {}
