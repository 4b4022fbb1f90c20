"""The report: the manifests of a run, collected in `report.json` and `report.html`.

`collect` reads only the run folder, so `compress report` gives the same report at any later time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from compress.report import evaluations, goals, intervals, stored_vectors
from compress.report.answers import answers, bandwidth
from compress.report.classes import classes, no_better
from compress.report.decision import decision_of
from compress.report.evaluations import Evaluation
from compress.report.flips.excerpt import excerpt
from compress.report.model.contents import SCHEMA, Contents, JudgedMetric, Stage, Timings
from compress.report.model.variant import Attention, Confidence, Latency, StoredVectors, TimedAccuracy, Variant, Vectors
from compress.report.served import served
from compress.report.variant_goals import judge_variants
from foundation.artifacts import artifact, document
from foundation.artifacts.chain import FLIPS, chain_of, changes, damage, read_chain
from foundation.artifacts.exported import Build, Divided
from foundation.artifacts.figures import Accuracy, Drop
from foundation.artifacts.run_folder import LOCK_FILE, Run, open_run
from foundation.artifacts.timed import VariantTiming, read_latency
from foundation.artifacts.triton import Triton
from foundation.core.engines import REFERENCE, SERVERS
from foundation.core.errors import InputError, Problem
from foundation.core.goals import Goals
from foundation.core.shown import pasted
from foundation.core.step_names import EVALUATION
from foundation.labels import vectors
from foundation.labels.answer import Answer
from foundation.labels.tasks import TASKS
from foundation.labels.vectors import VectorLabels
from foundation.measure.answers import read_row_adapters
from foundation.measure.chance import chance
from foundation.measure.judged import Judged
from foundation.measure.metrics import Metric
from foundation.measure.selective import aurc, auroc
from foundation.standalone.confidence import NAMES, features

FILE, PAGE = "report.json", "report.html"
UNCHECKED = ("commands", "warnings")
"""Keys that do not follow from the artifacts: a moved run has other commands."""


def write(folder: Path, warnings: Sequence[str] | None = None) -> Contents:
    """Writes `report.json` and `report.html`.

    Everything that the report is made of is hashed first.

    Args:
        folder: A finished run.
        warnings: Warnings of the run; None keeps the warnings of the last report.

    Returns:
        The contents of `report.json`.

    Raises:
        InputError: A file, manifest or link of the run is not what the run wrote.
    """
    from compress.report import page

    run = open_run(folder)
    chain = read_chain(folder)
    problems = [*damage(run), *changes(chain, run, "the run finished")]
    if problems:
        raise InputError.of(
            [
                *problems,
                Problem(f"{folder}", "no report is written from damaged files", remedy="`compress run` makes what is damaged again"),
            ]
        )
    report = collect(run, _stored_warnings(folder) if warnings is None else list(warnings))
    html = page.render(report)
    digest = hashlib.sha256(html.encode("utf-8")).hexdigest()
    report = report.with_(integrity=report.integrity.with_(page_sha256=digest))
    artifact.write_json(folder / FILE, report.written())
    artifact.write_text(folder / PAGE, html)
    return report


def forgeries(run: Run) -> list[Problem]:
    """Returns a problem for each part of `report.json` and `report.html` that does not follow from the files of the run."""
    cure = f"`{pasted('compress', 'report', run.folder)}` writes it again"
    try:
        told = document.read(Contents, run.folder / FILE)
    except artifact.DamagedArtifact as error:
        return [error.problem.advise(cure)]
    true = collect(run, list(told.warnings)).written()
    kept = {**told.written(), "integrity": told.integrity.with_(page_sha256=None).written()}
    kept["integrity"].pop("page_sha256", None)
    wrong = [key for key in true if key not in UNCHECKED and kept.get(key) != true[key]]
    given = f"{', '.join(wrong)}: not what the files of the run say"
    problems = [Problem(f"{run.folder / FILE}", given, remedy=cure)] if wrong else []
    if not (run.folder / PAGE).is_file() or artifact.file_digest(run.folder / PAGE) != told.integrity.page_sha256:
        problems.append(Problem(f"{run.folder / PAGE}", f"not the page that was written with {FILE}", remedy=cure))
    return problems


def collect(run: Run, warnings: list[str]) -> Contents:
    """Returns the report of a run."""
    evaluated, judged = list(evaluations.evaluations(run)), evaluations.judged(run)
    rows = _latency_rows(run)
    baseline = run.baseline
    chosen = served(run, evaluated[0])
    report: dict[str, object] = {
        "schema": SCHEMA,
        "name": run.recipe["name"],
        "task": run.recipe["model"]["task"],
        **_written(run),
        "environment": {**run.environment["hardware"], "versions": run.environment["versions"]},
        "metric": _judged_metric(judged, evaluated[0]),
        "baseline": baseline,
        "target": dict(run.recipe["target"]),
        "variants": [_variant(run, name, evaluated, rows) for name in run.variants],
        "bandwidth_bytes_per_s": bandwidth(run),
        "stages": [_stage(run, stage["id"], stage["seconds"], stage["cached"]) for stage in run.stages],
        "triton": _triton(run),
        "flips": _count_lines(run.folder / FLIPS),
        "warnings": warnings,
        "integrity": chain_of(run),
        "recipe": yaml.safe_dump(dict(run.recipe), sort_keys=False, allow_unicode=True, width=120),
        "commands": _commands(run),
        "served": chosen,
    }
    not_everywhere: dict[str, object] = {
        "evaluation_rows": evaluations.shared_rows(run),
        "data": evaluations.sizes(run),
        "timings": _timings(run, rows),
        "windows": run.artifacts[f"{EVALUATION}{baseline}"].metrics.get("windows"),
        "cascade": evaluations.cascade(run),
        "classes": classes(run, evaluated[0], chosen),
        "flipped_rows": excerpt(run.folder / FLIPS, None if chosen is None else chosen.variant),
    }
    report |= {key: value for key, value in not_everywhere.items() if value is not None}
    contents = Contents.model_validate(report)
    found = no_better(contents)
    contents = contents if found is None or found in warnings else contents.with_(warnings=(*warnings, found))
    return settled(contents, Goals.model_validate(run.recipe["goals"]))


def settled(report: Contents, limits: Goals) -> Contents:
    """Judges the goals of a recipe on a report, and adds why this is served.

    Args:
        report: All of report.json but `goals`, `findings` and `served.reason`.
        limits: The goals of the recipe.
    """
    judged = (*goals.judge(limits, report), *judge_variants(limits.variants or {}, report))
    report = report.with_(goals=judged, findings=tuple(goals.findings(limits, report)))
    if report.served is None:
        return report
    return report.with_(served=report.served.with_(reason=decision_of(report).reason))  # which the goals are part of


def _written(run: Run) -> dict[str, str]:
    """Returns when the run finished and with which version; empty in runs that do not say."""
    known = {"created": run.finished, "compress": run.version}
    return {key: value for key, value in known.items() if value is not None}


def _judged_metric(judged: Judged, baseline: Evaluation) -> JudgedMetric:
    """Returns the judged metric, which way it points, and what a model gets in it that knows nothing."""
    metric = judged.metric
    worst = chance(metric, baseline.logits, baseline.labels)
    return JudgedMetric(name=judged.name, higher_is_better=metric.higher_is_better, chance=worst)


def _triton(run: Run) -> Triton:
    """Returns the models of every repository, the search over settings, where one was asked for, and the cascade, where there is one."""
    found = evaluations.repository(run)
    made = Triton(models=(*found.models, *found.additional))
    made = made if found.tuned is None else made.with_(tuned=found.tuned)
    return made if found.cascade is None else made.with_(cascade=found.cascade)


def _variant(run: Run, name: str, evaluated: list[Evaluation], rows: list[VariantTiming]) -> Variant:
    in_torch = run.artifacts[f"{EVALUATION}{name}"].metrics
    build = evaluations.main_builds(run).get(name)
    first = next(iter(build.recommended), None) if build else None
    mine = [evaluation for evaluation in evaluated if evaluation.variant == name]
    reference, metric = evaluated[0], evaluations.judged(run).metric
    made = run.artifacts[name]
    return Variant(
        id=name,
        stages=artifact.lineage(name, run.variants),
        parameters=in_torch["parameters"],
        macs=in_torch["macs"],
        engine=first.engine if first else None,
        size_bytes=first.size_bytes if first else None,
        checkpoint_bytes=made.size_bytes,
        precision=build.precision if build else None,
        int8_share=first.int8_share if first else None,
        int8_share_all=first.int8_share_all if first else None,
        int4_share=first.int4_share if first else None,
        integer_weights=first.integer_weights if first else None,
        int8_share_reason=first.int8_share_reason if first else "no engine was built for this variant",
        int8_layers=first.layers if first else [],
        reported=first.reported if first else {},
        attention=_attention(run, name),
        metrics={one.backend: one.metrics for one in mine},
        accuracy=_accuracy(run, name, mine, build),
        drops={one.backend: _paired(metric, reference, one) for one in mine if one is not reference},
        latency=[_with_accuracy(run, row) for row in rows if row.variant == name],
        vectors=_vectors(metric, reference, mine),
        confidence=_confidence(TASKS[run.recipe["model"]["task"]].answer, reference, mine) if name != run.baseline else None,
        parity=build.parity if build else None,
        divided=_divided(run, name),
        answers=answers(run, name),
        quantization=made.metrics if made.manifest["stage"] == "quantize" else None,
        pruning=made.metrics if made.manifest["stage"] == "prune" else None,
        sparsity=made.metrics if made.manifest["stage"] == "sparsify" else None,
        compaction=made.metrics if made.manifest["stage"] == "compact" else None,
        adapter_training=made.metrics if made.manifest["stage"] == "adapters" else None,
        **_by_adapter(run, mine),
    )


def _by_adapter(run: Run, mine: list[Evaluation]) -> dict[str, dict[str, dict[str, Accuracy]]]:
    """Returns the judged metric of the rows of each adapter in every backend, as an entry of a variant; empty where rows name none."""
    names = read_row_adapters(run.artifacts[f"{EVALUATION}{run.baseline}"].path)
    if not names:
        return {}
    rows = {name: np.flatnonzero([other == name for other in names]) for name in dict.fromkeys(sorted(names))}
    return {
        "adapters": {
            one.backend: {
                name: evaluations.accuracy(run, one.logits[places], one.labels[places], None if one.groups is None else one.groups[places])
                for name, places in rows.items()
            }
            for one in mine
        }
    }


def _paired(metric: Metric, reference: Evaluation, one: Evaluation) -> Drop:
    return intervals.paired(metric, reference.logits, one.logits, one.labels, groups=one.groups)


def _vectors(metric: Metric, reference: Evaluation, mine: list[Evaluation]) -> dict[str, Vectors] | None:
    """Compares the vectors of a variant in every backend with the vectors of the baseline in torch; None for other answers.

    Vectors of another width have no cosine with them.
    """
    labels = reference.labels
    if not isinstance(labels, VectorLabels):
        return None
    found = {}
    for one in mine:
        cosines = vectors.cosines(reference.logits, one.logits) if reference.logits.shape == one.logits.shape else None
        found[one.backend] = Vectors(
            cosine=None if cosines is None else float(cosines.mean()),
            lowest_cosine=None if cosines is None else float(cosines.min()),
            top10_overlap=labels.overlap(reference.logits, one.logits),
            n=len(one.logits),
            stored=_stored(metric, reference, one, labels),
        )
    return found


def _confidence(answer: Answer, reference: Evaluation, mine: list[Evaluation]) -> dict[str, Confidence] | None:
    """Judges the margin of a variant in every backend by which rows the baseline in torch answers otherwise; None for other answers."""
    # Labels of zero-shot data are classes too, but the model answers with vectors: the labels do not decide.
    if answer.CONFIDENCE != "class" or reference.logits.shape[1] < 2:
        return None
    found = {}
    for one in mine:
        margins = features(one.logits, "class")[:, NAMES.index("margin")]
        differs = answer.other_rows(reference.logits, one.logits)
        found[one.backend] = Confidence(
            disagreement=float(differs.mean()), auroc=auroc(margins, differs), aurc=aurc(margins, differs), n=len(differs)
        )
    return found


def _stored(metric: Metric, reference: Evaluation, one: Evaluation, labels: VectorLabels) -> dict[str, StoredVectors]:
    """Judges the vectors as an index stores them, against the float vectors of the baseline in torch."""
    scale, width = stored_vectors.scale_of(one.logits, labels), one.logits.shape[1]
    found: dict[str, StoredVectors] = {}
    for form in stored_vectors.FORMS:
        coded = replace(one, logits=stored_vectors.codes(one.logits, form, scale))
        change = _paired(metric, reference, coded)
        found[form] = StoredVectors(
            value=metric.of(*labels.values(coded.logits)),
            difference=change.difference,
            low=change.low,
            high=change.high,
            n=change.n,
            groups=change.groups,
            top10_overlap=labels.overlap(reference.logits, coded.logits),
            bytes=stored_vectors.bytes_of(width, form),
            scale=scale if form == "int8" else None,
        )
    return found


def _divided(run: Run, name: str) -> Divided | None:
    """Returns what the export stage recorded of a variant that it divided over devices; None for others."""
    found = evaluations.exported(run).divided
    if found is None or found.variant != name:
        return None
    return Divided.model_validate({key: value for key, value in found.written().items() if key != "variant"})


def _attention(run: Run, name: str) -> list[Attention]:
    """Returns how many attentions run as one kernel, for each engine that reports it: built, or proved for a compute capability."""
    return [
        Attention(
            precision=build.precision,
            engine=entry.engine,
            capability=entry.capability,
            float_precision=entry.float_precision,
            fused=entry.attention.fused,
            required=entry.attention.required,
            of=entry.attention.of,
            reason=entry.attention.reason,
        )
        for build in evaluations.exported(run).builds
        if build.variant == name
        for entry in build.engines
        if entry.attention is not None
    ]


def _accuracy(run: Run, name: str, mine: list[Evaluation], build: Build | None) -> dict[str, Accuracy]:
    """Returns the judged metric in every backend with its 95 % interval, or why it was not measured."""
    cells = {one.backend: evaluations.accuracy(run, one.logits, one.labels, one.groups) for one in mine}
    for engine in run.recipe["target"]["engines"]:
        if engine not in cells and engine != REFERENCE:
            reasons = [entry.reason for entry in build.engines if entry.engine == engine] if build else []
            missing = "this variant was not exported" if build is None else "this engine was not built"
            cells[engine] = Accuracy(value=None, reason=next(iter(reasons), None) or missing)
    if not cells.keys() & SERVERS.keys():
        streams = [model for model in evaluations.served(run) if model.variant == name and model.tokens]
        has_repository = run.of_kind("model_repository") is not None
        reason = "this variant is not in the model repository" if has_repository else "the recipe has no triton_repo stage"
        reason = "the server streams answers, which are compared token by token: see Answers" if streams else reason
        cells[next(iter(SERVERS))] = Accuracy(value=None, reason=reason)
    return cells


def _with_accuracy(run: Run, row: VariantTiming) -> Latency:
    """Returns a latency row, with the judged metric of exactly the timed configuration if that was evaluated."""
    timed = Latency.model_validate({key: value for key, value in row.written().items() if key != "variant"})
    for build in evaluations.exported(run).builds:
        for engine in build.engines:
            if build.key(engine) == row.key and engine.metrics:
                return timed.with_(accuracy=TimedAccuracy(value=evaluations.judged_value(run, engine), n=engine.n))
    return timed


def _latency_rows(run: Run) -> list[VariantTiming]:
    measured = run.of_kind("latency")
    return read_latency(measured.path) if measured else []


def _timings(run: Run, rows: list[VariantTiming]) -> Timings | None:
    """Returns how busy the machine was while engines were timed; None for runs that did not watch it."""
    measured = run.of_kind("latency")
    machine = measured.metrics.get("machine") if measured else None
    if machine is None:
        return None
    estimated, busy = sum(bool(row.estimated) for row in rows), sum(bool(row.busy) for row in rows)
    return Timings(rows=len(rows), estimated=estimated, busy=busy, machine=machine)


def _stage(run: Run, name: str, seconds: float, cached: bool) -> Stage:
    manifest = run.artifacts[name].manifest
    return Stage(
        id=name,
        stage=manifest["stage"],
        seconds=seconds,
        cached=cached,
        peak_memory_bytes=manifest["peak_memory_bytes"],
        profiles=evaluations.profiles(run, name),
        dropped_expert_choices=evaluations.dropped_choices(run.artifacts[name].metrics),
    )


def _commands(run: Run) -> list[str]:
    return [
        pasted("compress", "run", run.folder / LOCK_FILE, "--out", run.folder),
        pasted("compress", "verify", run.folder, "--live"),
        pasted("compress", "bench", run.folder),
        pasted("compress", "serve", run.folder),
    ]


def _stored_warnings(folder: Path) -> list[str]:
    try:
        return list(document.read(Contents, folder / FILE).warnings)
    except artifact.DamagedArtifact:  # written again now
        return []


def _count_lines(path: Path) -> int | None:
    return path.read_bytes().count(b"\n") if path.is_file() else None
