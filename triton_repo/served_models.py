"""The models of a run or a deployment, and what clients call them.

    folder of a run               what clients call it
    quantize-int8                 sst2-minilm                 what is served has the name of the run, so that a client keeps its name ...
    quantize-int8-image, -text    clip-image, clip-text       ... when another variant or precision is served later
    baseline-fp32                 baseline-fp32               the others are loaded only with `--all`

What is served is the certified cascade of a run that has one, else what the run chose (`chosen` in triton.json). Where nothing competed
it is the main build of the last variant, as in the block `served` of the report. `compress serve` answers to the names of the folders, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foundation.artifacts.triton import Results, TritonModel
from triton_repo.config import model_names

MAIN = "int8"
"""Precision of the build that represents a variant; else its first one does."""


@dataclass(frozen=True)
class ServedModel:
    """A model of a repository."""

    name: str
    """Its name for clients."""
    folder: str
    """Its folder in the repository."""
    build: str
    """Its name in the run, under which the golden rows have its answers."""
    part: str | None = None
    """Suffix of the served name: empty, `-image` or `-text`. None: it is served only on request."""

    @property
    def role(self) -> str:
        """Its role, which a replacement has too: the part of the served model, or the build."""
        return self.build if self.part is None else f"served{self.part}"


def models_of(repository: Path, results: Results, run: str) -> list[ServedModel]:
    """Returns the models of the repository of a run, those that are served first.

    Args:
        repository: The folder `model_repository`.
        results: Contents of triton.json; empty where there is none: then everything is served under the names of the folders.
        run: Name of the run.
    """
    folders = model_names(repository)
    entries = [entry for entry in results.models if entry.model in folders]
    cascade = None if results.cascade is None else results.cascade.model
    if cascade in folders:
        named_alone = run if run not in folders or run == cascade else str(cascade)
        others = [folder for folder in folders if folder != cascade]
        return [ServedModel(named_alone, str(cascade), str(cascade), ""), *(ServedModel(folder, folder, folder) for folder in others)]
    build = _served_build(entries, results.chosen)
    if build is None:
        return [ServedModel(folder, folder, folder, "") for folder in folders]
    served = [str(entry.model) for entry in entries if (entry.variant, entry.precision) == build]
    parts = {folder: folder.removeprefix("-".join(build)) for folder in served}
    others = [folder for folder in folders if folder not in parts]
    named = {folder: f"{run}{part}" for folder, part in parts.items()}
    if not set(named.values()).isdisjoint(others):  # the run has the name of a model that is not served
        named = {folder: folder for folder in parts}
    return [
        *(ServedModel(named[folder], folder, folder, part) for folder, part in parts.items()),
        *(ServedModel(folder, folder, folder) for folder in others),
    ]


def divided(models: Sequence[ServedModel], everything: bool) -> tuple[list[ServedModel], list[ServedModel]]:
    """Returns the models to load or copy, and the models left out; only `everything` loads a model that is not served."""
    wanted = [model for model in models if everything or model.part is not None]
    return wanted, [model for model in models if model not in wanted]


def written(models: Sequence[ServedModel]) -> list[dict[str, str | None]]:
    """Returns models as plain data, for the manifest of a deployment."""
    return [asdict(model) for model in models]


def read(entries: Sequence[Mapping[str, Any]]) -> list[ServedModel]:
    """Returns the models that `written` wrote."""
    return [ServedModel(**entry) for entry in entries]


def of_earlier_version(repository: Path, chosen: Sequence[str] | None, run: str) -> list[ServedModel]:
    """Returns the models of a deployment that says only which were chosen; a single one has the name of the run.

    Args:
        repository: The folder `model_repository`.
        chosen: Names of what was chosen; None: all are served.
        run: Name of the run.
    """
    folders = model_names(repository)
    if chosen is None:
        return [ServedModel(folder, folder, folder, "") for folder in folders]
    alone = len(chosen) == 1 and run not in folders
    served = [ServedModel(run if alone else folder, folder, folder, "" if alone else f"-{folder}") for folder in chosen]
    return [*served, *(ServedModel(folder, folder, folder) for folder in folders if folder not in chosen)]


def aliases(models: Sequence[ServedModel]) -> dict[str, str]:
    """Returns an earlier name that clients may still use for a model: its name in the run."""
    names = {model.name for model in models}
    return {alias: model.name for model in models for alias in (model.build, model.folder) if alias not in names}


def renamed(readme: str, models: Sequence[ServedModel], copied: Sequence[ServedModel]) -> str:
    """Returns the README of a repository for a part of its models, called what clients call them.

    Args:
        readme: The README.
        models: The models that it is about.
        copied: Those that are left; the first takes the place of the others in examples.
    """
    names = {model.folder: (model if model in copied else copied[0]).name for model in models}
    rows = tuple(f"| `{model.folder}`" for model in models if model not in copied)
    known = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})(?![\w.-])")
    lines = [line for line in readme.splitlines(keepends=True) if not line.startswith(rows)]
    return known.sub(lambda found: names[found[1]], "".join(lines))


def _served_build(entries: Sequence[TritonModel], chosen: str | None) -> tuple[str, str] | None:
    """Returns variant and precision of what is served; None where there are no entries."""
    if not entries:
        return None
    named = next((entry for entry in entries if chosen is not None and entry.model == chosen), None)
    if named is None:
        last = [entry for entry in entries if entry.variant == entries[-1].variant]
        named = next((entry for entry in last if entry.precision == MAIN), last[0])
    return str(named.variant), str(named.precision)
