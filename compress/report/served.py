"""The served configuration, and why it is served: the block `served` of report.json, by which goals are judged.

Where configurations compete, `foundation.measure.fastest` has chosen, and `ranking` holds all of them. Otherwise it is the last variant in
the first engine of the target, in its recommended mode. In both cases the metric belongs to exactly this configuration, in its engine and
behind the server that ran it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compress.report import evaluations, intervals
from compress.report.evaluations import Evaluation
from compress.report.model.contents import Ranked, Served
from foundation.artifacts.artifact import lineage
from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.figures import Accuracy, Drop, Metrics
from foundation.artifacts.run_folder import Run
from foundation.artifacts.triton import TritonModel
from foundation.core.goals import Goals
from foundation.core.step_names import EVALUATION
from foundation.core.target import Target
from foundation.labels.tasks import TASKS, Task
from foundation.measure import fastest
from foundation.measure.answers import load_predictions
from foundation.measure.fastest import NAMES, Measured, competes
from foundation.measure.fastest_answers import engines_that_answer
from foundation.measure.judged import Judged


def served(run: Run, reference: Evaluation) -> Served | None:
    """Returns the block; None where no engine was built.

    Args:
        run: A finished run.
        reference: The baseline in torch.
    """
    ranked = ranking(run)
    chosen = ranked[0].candidate.names if ranked else _first(run)
    if chosen is None:
        return None
    build, entry = _find(run, chosen)
    cells, drops = _accuracy(run, build, entry, reference)
    return Served(
        **chosen,
        size_bytes=entry.size_bytes,
        accuracy=cells,
        drops=drops,
        metrics=_metrics(run, build, entry),
        reason=None if ranked else _reason(run, _answering(run, build)),
        ranking=[_row(one) for one in ranked],
    )


def ranking(run: Run) -> list[fastest.Ranked]:
    """Returns the configurations that compete, the one that is served first; empty where they do not."""
    task: Task = run.recipe["model"]["task"]
    exported, latency = run.of_kind("engine"), run.of_kind("latency")
    target = run.recipe["target"]
    if exported is None or latency is None or "serve" not in target or not competes(task, Target.model_validate(target)):  # or an older run
        return []
    line = lineage(list(run.variants)[-1], run.variants)
    goals, judged = Goals.model_validate(run.recipe["goals"]), evaluations.judged(run)
    return fastest.fastest(Measured(exported.path, latency.path, line, run.baseline, _before(run, judged)), goals, judged)


def _before(run: Run, judged: Judged) -> float:
    """Returns the judged metric of the baseline in torch."""
    baseline = run.baseline
    return judged.figure(run.artifacts[f"{EVALUATION}{baseline}"].metrics["metrics"], run.predictions(baseline))


def _first(run: Run) -> dict[str, str] | None:
    """Returns the last variant in the first engine of the target, or in that which answers clearly faster, in its recommended mode; None
    where it was not built."""
    build = evaluations.main_builds(run).get(list(run.variants)[-1])
    answering = _answering(run, build)
    wanted = build.recommended if build else ()
    entry = next((entry for entry in wanted if answering is None or entry.engine == answering), None)
    if build is None or entry is None:
        return None
    return dict(zip(NAMES, build.key(entry), strict=True))


def _answering(run: Run, build: Build | None) -> str | None:
    """Returns the engine that answers the prompts of a build; None where none does."""
    exported, latency, target = run.of_kind("engine"), run.of_kind("latency"), run.recipe["target"]
    task: Task = run.recipe["model"]["task"]
    if build is None or exported is None or "serve" not in target or not TASKS[task].generates or target["device"] != "cpu":
        return None
    judged = evaluations.judged(run)
    place, goals = None if latency is None else latency.path, Goals.model_validate(run.recipe["goals"])
    proposed = any(stage.get("triton_repo", {}).get("proposals", False) for stage in run.recipe["stages"])
    found = engines_that_answer(
        exported.path, place, Target.model_validate(target), goals, (judged.name, _before(run, judged)), proposed=proposed
    )
    return next(iter(found[build.folder]), None)


def _find(run: Run, names: Mapping[str, str]) -> tuple[Build, Engine]:
    """Returns a build and one of its engines."""
    for build in evaluations.exported(run).builds:
        for entry in build.engines:
            if build.key(entry) == tuple(names[key] for key in NAMES):
                return build, entry
    raise LookupError(f"export.json has no {names}")


def predictions_of(run: Run, names: Mapping[str, str]) -> dict[str, Path]:
    """Returns the files with the predictions of a configuration, by backend: its engine, and the server that ran it.

    Args:
        run: A finished run.
        names: What the configuration is called by, as in `served` of report.json.

    Raises:
        LookupError: The run has no such configuration.
    """
    return _files(run, *_find(run, names))


def _files(run: Run, build: Build, entry: Engine) -> dict[str, Path]:
    exported, repository = run.of_kind("engine"), run.of_kind("model_repository")
    files = {}
    if exported is not None and entry.predictions:
        files[entry.engine] = exported.path / entry.predictions
    for model in evaluations.served(run):
        if _is(model, build, entry) and model.predictions and repository is not None:
            files[model.server] = repository.path / model.predictions
    return files


def _is(model: TritonModel, build: Build, entry: Engine) -> bool:
    """Whether a model of the server is this engine of this build."""
    wanted = (build.variant, build.precision, entry.mode, entry.engine)
    return (model.variant, model.precision, model.mode, model.engine) == wanted


def _accuracy(run: Run, build: Build, entry: Engine, reference: Evaluation) -> tuple[dict[str, Accuracy], dict[str, Drop]]:
    """Returns the primary metric of a configuration by backend, and what it lost against the baseline in torch."""
    metric = evaluations.judged(run).metric
    cells, drops = {}, {}
    for backend, file in _files(run, build, entry).items():
        logits, labels = load_predictions(file, run.recipe["model"]["task"])
        cells[backend] = evaluations.accuracy(run, logits, labels, reference.groups)
        drops[backend] = intervals.paired(metric, reference.logits, logits, labels, groups=reference.groups)
    return cells, drops


def _metrics(run: Run, build: Build, entry: Engine) -> dict[str, Metrics]:
    """Returns every metric of a configuration by backend."""
    files = _files(run, build, entry)
    own = {entry.engine: entry.metrics} if entry.engine in files else {}
    models = [model for model in evaluations.served(run) if _is(model, build, entry)]
    return own | {model.server: model.metrics for model in models if model.server in files}


def _row(ranked: fastest.Ranked) -> Ranked:
    one = ranked.candidate
    return Ranked(**one.names, metric=one.metric, size_bytes=one.size_bytes, time_ms=round(ranked.time_ms, 4), missed=ranked.missed)


def _reason(run: Run, answering: str | None) -> str:
    """Returns in one line why this is served where nothing competed; else `compress.report.decision` says it."""
    if run.recipe["target"].get("serve") == "first":
        return "target.serve: first"
    if answering is not None:
        return "the last variant in the engine of the target that answers fastest, or in the first one that nearly does"
    return "the last variant in the first engine of the target"
