"""The report as one self-contained HTML page: no network, no script, printable, light and dark.

`render` turns the contents of `report.json` into formatted strings and positions; `report.html.j2` lays them out with
`report.css` and `charts.j2`. The template escapes everything it prints, because names come from users. A figure that was not measured is
printed as `not measured` with the reason, never as a blank or a 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from compress.report import phrases
from compress.report.decision import Decision, decision_of
from compress.report.labelled import labelled
from compress.report.model.contents import Contents, Goal
from compress.report.model.variant import Variant
from compress.report.phrases import NO_REASON, NOT_MEASURED, engine_name
from compress.report.sections import accuracy, rows, timings
from compress.report.sections.adapters import adapters
from compress.report.sections.cascade import cascade, headline
from compress.report.sections.choice import choice
from compress.report.sections.compact import compaction
from compress.report.sections.divided import divided
from compress.report.sections.export import layers, parity
from compress.report.sections.generation import generation
from compress.report.sections.profile import profiles
from compress.report.sections.prune import pruning
from compress.report.sections.quantize import quantization
from compress.report.sections.sparsify import sparsity
from compress.report.sections.tuned import tuned
from compress.report.view import View, plain
from foundation.labels.tasks import TASKS
from foundation.measure import fastest

SERVED = "served"
"""Name of a table's row for the served model, whichever variant that is."""


def render(report: Contents) -> str:
    """Returns the page of a report.

    Args:
        report: A report of any version; figures that it lacks are shown as not measured.

    Returns:
        One self-contained HTML document.
    """
    decision = decision_of(report)
    page = template("report.html.j2").render(
        name=report.name or "unnamed run",
        facts=_facts(report),
        verdict=headline(report) or phrases.verdict(decision),
        alone=phrases.verdict(decision) if headline(report) else None,
        goals_sentence=phrases.goals_sentence(decision.goals),
        state=state_of(decision.goals),
        figures=_figures(decision),
        goals=[_goal(goal, report.metric.name) for goal in decision.goals],
        findings=[_goal(found, report.metric.name) for found in decision.findings],
        warnings=report.warnings,
        metric=report.metric.name,
        lower_is_better=report.metric.higher_is_better is False,
        unit=TASKS[report.task].counts if report.task is not None and report.task in TASKS else "rows",
        windows=report.windows,
        plots=accuracy.plots(report, decision),
        ledger=accuracy.ledger(report, decision),
        others=accuracy.other_metrics(report, decision),
        stored=accuracy.stored(report),
        confidence=accuracy.confidence(report),
        shapes=accuracy.latency(report, decision),
        timings=timings.sentence(report),
        served=accuracy.served(report),
        choice=choice(decision),
        fastest=fastest,
        cascade=cascade(report),
        tuned=tuned(report),
        splits=rows.splits(report),
        classes=rows.classes(report),
        flipped=rows.flipped(report),
        memory=rows.memory(report),
        sizes=_sizes(report, decision),
        pruning=pruning(report),
        sparsity=sparsity(report),
        compaction=compaction(report),
        adapters=adapters(report),
        generation=generation(report),
        layers=layers(report),
        quantization=quantization(report),
        parity=parity(report),
        divided=divided(report),
        stages=_stages(report),
        profiles=profiles(report),
        environment=_environment_rows(report),
        recipe=report.recipe,
        commands=report.commands,
        anchor=report.integrity.anchor,
    )
    return labelled(page)


@cache
def template(name: str) -> Template:
    """Returns a template of this folder, which escapes everything it prints."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["headline"] = phrases.headline
    return environment.get_template(name)


def _facts(report: Contents) -> list[str]:
    made_by = f"compress {report.compress}" if report.compress else None
    return [fact for fact in (report.task, phrases.moment(report.created), made_by, report.environment.cpu) if fact]


def state_of(judged: Sequence[Goal]) -> str:
    """Returns `missed` if a goal is, `met` if all are, else `open`."""
    if any(goal.met is False for goal in judged):
        return "missed"
    return "met" if judged and all(goal.met for goal in judged) else "open"


def _figures(decision: Decision) -> list[View]:
    faster, cost, cell, size = decision.speedup, decision.cost, decision.after, decision.size_bytes
    metric, backend = str(decision.metric), decision.hop
    spread = phrases.interval(cell.low, cell.high, metric)
    lost = phrases.change_interval(cost.low, cost.high, metric)
    trust = phrases.trust_in(faster.low, faster.high, faster.busy)
    where = f"at the worst shape: {phrases.place(faster.at)}{f', {trust}' if trust else ''}"
    return [
        _tile("Speed-up", faster.value, phrases.ratio(faster.value), where, faster.reason),
        _tile(
            phrases.headline(metric),
            cell.value,
            phrases.figure(cell.value, metric),
            f"{engine_name(backend)}, n {phrases.rows(cell)}" + (f", 95 % {spread}" if spread else ""),
            cell.reason,
        ),
        _tile(
            f"{phrases.headline(metric)} change",
            cost.value,
            phrases.change(cost.value, metric) or NOT_MEASURED,
            "against the baseline in torch" + (f", 95 % {lost}" if lost else ""),
            cost.reason,
        ),
        _tile(
            "Deployed size",
            size,
            phrases.size(size),
            f"baseline {phrases.size(decision.baseline_bytes)}",
            "no engine was built",
        ),
        _integers(decision.variant),
    ]


def _integers(variant: Variant) -> View:
    """Returns the tile of the int8 products, or of the integer weights of a model that multiplies only floats."""
    share, all_share, weights = variant.int8_share, variant.int8_share_all, variant.integer_weights
    if share == 0 and weights:
        return _tile("Integer weights", weights, phrases.share(weights), "of all weights; multiplied by float activations", None)
    return _tile(
        "int8 share",
        share,
        phrases.share(share),
        "of the MACs of weight GEMMs" + (f"; {phrases.share(all_share)} with attention" if all_share is not None else ""),
        variant.int8_share_reason,
    )


def _tile(name: str, value: float | None, text: str, note: str, reason: str | None) -> View:
    return {"name": name, "known": value is not None, "text": text, "note": note if value is not None else reason or NO_REASON}


def _goal(goal: Goal, metric: str | None) -> View:
    spread = phrases.change_interval(goal.low, goal.high, metric) if goal.goal == "max_drop" else None
    return {
        "state": "open" if goal.met is None else "met" if goal.met else "missed",
        "key": goal.goal or "",
        "name": phrases.goal_name(goal, metric),
        "value": phrases.goal_value(goal, metric),
        "spread": f"95 % {spread}" if spread else phrases.both_latencies(goal),
        "at": phrases.place(goal.at),
        "reason": goal.reason or (NO_REASON if goal.value is None else None),
    }


def _sizes(report: Contents, decision: Decision) -> list[View]:
    """Returns the sizes of the served model, first, and of every variant in its first engine."""
    rows = [(variant.id, phrases.built_in(variant), variant) for variant in report.variants]
    if decision.served is not None:
        served = decision.variant.with_(size_bytes=decision.size_bytes)
        rows = [(SERVED, phrases.configuration(decision.served), served), *rows]
    largest = max((size or 0 for *_, variant in rows for size in (variant.size_bytes, variant.checkpoint_bytes)), default=0) or 1
    return [
        {
            "id": name,
            "what": what,
            "bars": [
                {
                    "known": size is not None,
                    "text": phrases.size(size),
                    "percent": round(100 * (size or 0) / largest, 2),
                    "reason": reason,
                }
                for size, reason in (
                    (variant.size_bytes, "no engine was built for this variant"),
                    (variant.checkpoint_bytes, NO_REASON),
                )
            ],
            "parameters": phrases.count(variant.parameters),
            "macs": phrases.count(variant.macs),
        }
        for name, what, variant in rows
    ]


def _stages(report: Contents) -> View:
    known = [stage.seconds or 0 for stage in report.stages]
    longest = max(known, default=0) or 1
    rows = [
        {
            "id": stage.id,
            "text": phrases.duration(stage.seconds),
            "cached": bool(stage.cached),
            "memory": phrases.size(stage.peak_memory_bytes) if stage.peak_memory_bytes else NOT_MEASURED,
            "width": round(100 * (stage.seconds or 0) / longest, 2),
        }
        for stage in report.stages
    ]
    dropped = [f"{stage.id} {100 * stage.dropped_expert_choices:.2f} %" for stage in report.stages if stage.dropped_expert_choices]
    return {"rows": rows, "total": phrases.duration(sum(known)), "dropped": ", ".join(dropped)}


def _environment_rows(report: Contents) -> list[tuple[str, str]]:
    rows = [(key, _surrounding(key, value)) for key, value in report.environment.written().items() if key != "versions"]
    rows += [(key, plain(value)) for key, value in report.target.written().items() if value is not None]
    return [(_title(key), text) for key, text in rows] + [(key, plain(value)) for key, value in report.environment.versions.items()]


def _title(key: str) -> str:
    words = re.sub(r"_bytes$", "", key).replace("_", " ")
    return "GPUs" if words == "gpus" else re.sub("^cpu", "CPU", words[:1].upper() + words[1:], flags=re.I)


def _surrounding(key: str, value: Any) -> str:
    return phrases.size(value) if key.endswith("_bytes") else plain(value)
