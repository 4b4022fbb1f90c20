"""The predictions of every variant in every backend: torch, the engines and the running server.

Each evaluation covers the whole evaluation split; its artifact stores the predictions in row order. This module loads them, and keeps 64
golden rows for `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from compress.report import intervals
from compress.report.model.contents import EvaluationRows, Split
from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.cascade import FILE as CASCADE
from foundation.artifacts.cascade import Cascade
from foundation.artifacts.chain import DATA
from foundation.artifacts.document import Figures, read
from foundation.artifacts.exported import Build, Engine, Exported
from foundation.artifacts.figures import Accuracy
from foundation.artifacts.run_folder import PROFILES, Run
from foundation.artifacts.triton import Results, TritonModel
from foundation.core.engines import REFERENCE, SERVERS
from foundation.core.errors import InputError
from foundation.core.files import check_plain
from foundation.core.shown import reason
from foundation.core.step_names import EVALUATION
from foundation.data.splits import Data
from foundation.labels.form import Labels
from foundation.labels.zero_shot import ImagesAndTexts
from foundation.measure.answers import load_groups, load_logits, load_predictions
from foundation.measure.engine_process import read_rows, write_rows
from foundation.measure.judged import SEPARATOR, Judged, judged_of
from foundation.standalone.preprocess import Row

GOLDEN_ROWS = 64
SERVED = "triton.json"
EXPORTED = "export.json"


class Behind(NamedTuple):
    """The engine of a served model, in the served mode, and its predictions."""

    engine: str
    file: Path


@dataclass(frozen=True)
class Evaluation:
    """The predictions of one variant in one backend, on the whole evaluation split."""

    variant: str
    backend: str
    """An engine (`compress list engines`), or a server."""
    mode: str
    precision: str
    logits: np.ndarray
    """float32 [n, C], in the order of the evaluation split; for generation [n, T, 2], see `foundation.labels.next_token`."""
    labels: Labels
    metrics: dict[str, float]
    groups: np.ndarray | None = None
    """Group of each value that metrics are means over, int64 [m] (`foundation.data.groups`); None in runs that do not say."""
    behind: Behind | None = None
    """The engine that a server runs; None for other backends, and where that engine was not evaluated."""


class Stored(NamedTuple):
    """The predictions of one variant in one backend; see `Evaluation`."""

    variant: str
    backend: str
    mode: str
    precision: str
    file: Path
    metrics: dict[str, float]
    behind: Behind | None = None


def judged(run: Run) -> Judged:
    """Returns the metric that is judged: `goals.metric`, else the primary one."""
    asked = run.recipe["goals"].get("metric")
    named = asked is not None and SEPARATOR in asked
    names = class_names(run) if named else {}
    return judged_of(run.recipe["model"]["task"], asked, [names[number] for number in sorted(names)])


def class_names(run: Run) -> dict[int, str]:
    """Returns the names of the classes of the baseline by number; empty where its config names none."""
    file = run.artifacts[run.baseline].path / "config.json"
    named = artifact.read_json(file).get("id2label") if file.is_file() else None
    return {} if named is None else {int(number): str(name) for number, name in named.items()}


def judged_value(run: Run, entry: Engine) -> float:
    """Returns the judged metric of an engine of export.json."""
    made, found = run.of_kind("engine"), judged(run)
    assert made is not None, "the entry is one of its engines"
    return found.figure(entry.figures, made.path / str(entry.predictions))


def exported(run: Run) -> Exported:
    """Returns the contents of export.json; empty if the recipe does not export."""
    made = run.of_kind("engine")
    return Exported() if made is None else read(Exported, made.path / EXPORTED)


def cascade(run: Run) -> Cascade | None:
    """Returns the contents of cascade.json; None in runs without that stage."""
    made = run.of_kind("cascade")
    return None if made is None else read(Cascade, made.path / CASCADE)


def profiles(run: Run, stage: str) -> list[Figures]:
    """Returns the profiles of the trainings of a stage, by name; empty where none were asked for."""
    folder = run.folder / PROFILES / run.artifacts[stage].path.name
    return [artifact.read_json(file) for file in sorted(folder.glob("*.json"))]


def dropped_choices(figures: Mapping[str, Any]) -> float | None:
    """Returns the largest share of the choices of experts that a training of a stage dropped; None where processes spread no experts."""
    steps = figures.get("steps")
    trainings = [figures, figures.get("recovery"), figures.get("learning"), *(steps if isinstance(steps, list) else [])]
    shares = (training.get("dropped_expert_choices") for training in trainings if isinstance(training, Mapping))
    return max((share for share in shares if share is not None), default=None)


def shared_rows(run: Run) -> EvaluationRows | None:
    """Returns which rows train and evaluation had in common, and the digest of the latter; None in runs that do not say."""
    found = run.artifacts[f"{EVALUATION}{run.baseline}"].metrics.get("evaluation_rows")
    return None if found is None else EvaluationRows.model_validate(found)


def sizes(run: Run) -> list[Split] | None:
    """Returns rows and lengths of each split; None in runs that do not say."""
    file = run.folder / DATA
    return [Split.model_validate(split) for split in artifact.read_json(file)["splits"]] if file.is_file() else None


def accuracy(run: Run, logits: np.ndarray, labels: Labels, groups: np.ndarray | None) -> Accuracy:
    """Returns the judged metric of predictions with its 95 % interval, and how many of the rows are trained on, where any is."""
    cell, shared = intervals.single(judged(run).metric, logits, labels, groups=groups), shared_rows(run)
    return cell.with_(in_train=shared.in_train) if shared is not None and shared.in_train else cell


def main_builds(run: Run) -> dict[str, Build]:
    """Returns the build that represents each exported variant: its int8 build if there is one, else its float build."""
    chosen: dict[str, Build] = {}
    for build in exported(run).builds:
        if build.variant not in chosen or build.precision == "int8":
            chosen[build.variant] = build
    return chosen


def served(run: Run) -> tuple[TritonModel, ...]:
    """Returns the models that were evaluated through a server; empty if none was."""
    return repository(run).models


def answering(run: Run) -> tuple[TritonModel, ...]:
    """Returns the same models and, after them, the cascade of the repository."""
    found = repository(run)
    return found.models if found.cascade is None else (*found.models, found.cascade)


def repository(run: Run) -> Results:
    """Returns the contents of triton.json; empty without a model repository."""
    made = run.of_kind("model_repository")
    if made is None or not (made.path / SERVED).exists():
        return Results()
    return read(Results, made.path / SERVED)


def evaluations(run: Run) -> Iterator[Evaluation]:
    """Yields the evaluations of every variant in the order torch, engines, server; of each engine only its recommended mode."""
    groups = load_groups(run.predictions(run.baseline))  # every backend answers the same rows
    yield from (replace(one, groups=groups) for one in _evaluations(run))


def _evaluations(run: Run) -> Iterator[Evaluation]:
    for one in stored(run):
        logits, labels = load_predictions(one.file, run.recipe["model"]["task"])
        yield Evaluation(one.variant, one.backend, one.mode, one.precision, logits, labels, one.metrics, behind=one.behind)


def stored(run: Run) -> Iterator[Stored]:
    """Yields the predictions of every variant, in the order torch, engines, server; of each engine only its recommended mode."""
    built, made = run.of_kind("engine"), run.of_kind("model_repository")
    for name in run.variants:
        yield Stored(name, REFERENCE, "eager", "", run.predictions(name), run.artifacts[f"{EVALUATION}{name}"].metrics["metrics"])
        build = main_builds(run).get(name)
        if build is None:
            continue
        for engine in build.recommended:
            if engine.predictions and built:
                path = built.path / engine.predictions
                yield Stored(name, engine.engine, engine.mode, build.precision, path, engine.figures)
        for model in served(run):
            if (model.variant, model.precision) == (name, build.precision) and model.predictions and made:
                file, behind = made.path / model.predictions, _behind(model, build, built)
                yield Stored(name, model.server, "", build.precision, file, model.figures, behind)


def _behind(model: TritonModel, build: Build, built: Artifact | None) -> Behind | None:
    """Returns the engine of a served model."""
    entry = next((one for one in build.engines if (one.engine, one.mode) == (model.engine, model.mode)), None)
    return None if built is None or entry is None or not entry.predictions else Behind(entry.engine, built.path / entry.predictions)


def write_golden(run: Run, data: Data) -> None:
    """Writes `golden.safetensors`: 64 rows with their logits from every backend and served model; `verify` then needs no data set."""
    count = min(GOLDEN_ROWS, len(data.evaluation))
    chosen = np.linspace(0, len(data.evaluation) - 1, count).round().astype(np.int64)
    if isinstance(data.evaluation.labels, ImagesAndTexts):  # others are golden by themselves
        chosen = np.array(data.evaluation.labels.evenly(count), np.int64)
    tensors: dict[str, np.ndarray] = {"row": chosen}
    for evaluation in evaluations(run):
        if evaluation.backend not in SERVERS:
            tensors[f"logits.{evaluation.variant}.{evaluation.backend}"] = np.ascontiguousarray(evaluation.logits[chosen])
    made = run.of_kind("model_repository")
    for model in answering(run):
        if model.predictions and made:
            logits = load_logits(made.path / model.predictions)
            tensors[f"logits.{model.model}.{model.server}"] = np.ascontiguousarray(logits[chosen])
    temporary = run.folder / ".golden.safetensors.tmp"
    write_rows(temporary, [data.evaluation.rows[row] for row in chosen], tensors)
    temporary.replace(run.folder / "golden.safetensors")


def read_golden(path: Path) -> tuple[list[Row], dict[str, np.ndarray]]:
    """Returns the golden rows and their logits: by `variant.backend`, and by `model.server` for a server.

    Raises:
        InputError: The file is missing or damaged.
    """
    check_plain(path, str(path))
    try:
        logits = {name.removeprefix("logits."): value for name, value in load_file(path).items() if name.startswith("logits.")}
        rows = read_rows(path)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}", f"damaged ({reason(error)})", remedy="`compress run` writes it again") from error
    if not rows or any(len(value) != len(rows) for value in logits.values()):
        raise InputError(f"{path}", f"damaged ({len(rows)} rows, and another number of logits)", remedy="`compress run` writes it again")
    return rows, logits
