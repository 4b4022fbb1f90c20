"""The report as one self-contained HTML page: no network, no script, printable, light and dark.

`render` turns the report (a plain dict, `report.json`) into formatted strings and positions; `report.html.j2` lays them out with
`report.css` and `charts.j2`. The template escapes everything it prints, because names come from users. A figure that was not measured is
printed as `not measured` with the reason, never as a blank or a 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from compress.report import phrases
from compress.report.decision import Decision, decision_of
from compress.report.labelled import labelled
from compress.report.phrases import NO_REASON, NOT_MEASURED, engine_name
from compress.report.sections import accuracy, rows, timings
from compress.report.sections.choice import choice
from compress.report.sections.divided import divided
from compress.report.sections.export import layers, parity
from compress.report.sections.generation import generation
from compress.report.sections.profile import profiles
from compress.report.sections.prune import pruning
from compress.report.sections.quantize import quantization
from compress.report.sections.sparsify import sparsity
from compress.report.sections.tuned import tuned
from compress.report.view import Report, View, plain
from foundation.core.tasks import TASKS

LISTS = (
    *("variants", "latency", "goals", "findings", "stages", "warnings", "commands", "models", "int8_layers", "layers", "gpus"),
    "cpu_features",
)
SERVED = "served"
"""Row of a table that is of what is served, whichever variant that is."""
BY_PLACE = ("turns_ms",)
"""Lists whose places mean something, such as the turn of a time: a null entry stays."""
MAPS = ("environment", "metric", "metrics", "accuracy", "drops", "triton", "versions", "target")


def render(report: Report) -> str:
    """Returns the page of a report.

    Args:
        report: As in `report.json`; every part may be missing or None.

    Returns:
        One self-contained HTML document.
    """
    whole = complete(report)
    decision = decision_of(whole)
    page = template("report.html.j2").render(
        name=whole.get("name") or "unnamed run",
        facts=_facts(whole),
        verdict=phrases.verdict(decision),
        goals_sentence=phrases.goals_sentence(list(decision.goals)),
        state=state_of(decision.goals),
        figures=_figures(decision),
        goals=[_goal(goal, _metric(whole)) for goal in decision.goals],
        findings=[_goal(found, _metric(whole)) for found in decision.findings],
        warnings=whole["warnings"],
        metric=_metric(whole),
        lower_is_better=whole["metric"].get("higher_is_better") is False,
        unit=TASKS[whole["task"]].counts if whole.get("task") in TASKS else "rows",
        windows=whole.get("windows"),
        plots=accuracy.plots(whole, decision),
        ledger=accuracy.ledger(whole, decision),
        others=accuracy.other_metrics(whole, decision),
        stored=accuracy.stored(whole),
        shapes=accuracy.latency(whole, decision),
        timings=timings.sentence(whole),
        served=accuracy.served(whole),
        choice=choice(decision),
        tuned=tuned(whole),
        splits=rows.splits(whole),
        classes=rows.classes(whole),
        flipped=rows.flipped(whole),
        memory=rows.memory(whole),
        sizes=_sizes(whole, decision),
        pruning=pruning(whole),
        sparsity=sparsity(whole),
        generation=generation(whole),
        layers=layers(whole),
        quantization=quantization(whole),
        parity=parity(whole),
        divided=divided(whole),
        stages=_stages(whole),
        profiles=profiles(whole),
        environment=_environment_rows(whole),
        recipe=whole.get("recipe"),
        commands=whole["commands"],
        anchor=(whole.get("integrity") or {}).get("anchor"),
    )
    return labelled(page)


def complete(value: Any) -> Any:
    """Returns a copy of a report with empty lists and maps in place of missing or null ones; values are unchanged."""
    report = _fill(value)
    for key in ("variants", "goals", "findings", "stages", "warnings", "commands"):
        report.setdefault(key, [])
    for key in ("environment", "metric", "triton", "target"):
        report.setdefault(key, {})
    report["metric"]["name"] = report["metric"].get("name") or "the metric"
    for variant in report["variants"]:
        variant["id"] = variant.get("id") or "unnamed"
        for key in ("latency", "int8_layers"):
            variant.setdefault(key, [])
        for key in ("metrics", "accuracy", "drops"):
            variant.setdefault(key, {})
    return report


def _fill(value: Any) -> Any:
    if isinstance(value, Mapping):
        empty: View = {**{key: [] for key in LISTS}, **{key: {} for key in MAPS}}
        filled = {
            key: empty[key] if item is None and key in empty else item if key in BY_PLACE else _fill(item) for key, item in value.items()
        }
        # a metric may have the same name as one of the maps
        return filled | ({"metrics": value["metrics"]} if value.get("metrics") else {})
    return [_fill(item) for item in value if item is not None] if isinstance(value, list | tuple) else value


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
    return environment.get_template(name)


def _metric(report: Report) -> str:
    return str(report["metric"]["name"])


def _facts(report: Report) -> list[str]:
    cpu = report["environment"].get("cpu")
    made_by = f"compress {report['compress']}" if report.get("compress") else None
    return [str(fact) for fact in (report.get("task"), phrases.moment(report.get("created")), made_by, cpu) if fact]


def state_of(judged: Sequence[Report]) -> str:
    """Returns `missed` if a goal is, `met` if all are, else `open`."""
    if any(goal.get("met") is False for goal in judged):
        return "missed"
    return "met" if judged and all(goal.get("met") for goal in judged) else "open"


def _figures(decision: Decision) -> list[View]:
    faster, cost, cell, size = decision.speedup, decision.cost, decision.after, decision.size_bytes
    metric, backend = str(decision.metric), decision.hop
    spread = phrases.interval(cell.get("low"), cell.get("high"), metric)
    lost = phrases.change_interval(cost.low, cost.high, metric)
    trust = phrases.trust_in(faster.low, faster.high, faster.busy)
    where = f"at the worst shape: {phrases.place(faster.at)}{f', {trust}' if trust else ''}"
    return [
        _tile("Speed-up", faster.value, phrases.ratio(faster.value), where, faster.reason),
        _tile(
            phrases.headline(metric),
            cell.get("value"),
            phrases.figure(cell.get("value"), metric),
            f"{engine_name(backend)}, n {phrases.rows(cell)}" + (f", 95 % {spread}" if spread else ""),
            cell.get("reason"),
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


def _integers(variant: Report) -> View:
    """Returns the tile of the int8 products, or of the integer weights of a model that multiplies them in float alone."""
    share, all_share, weights = (variant.get(key) for key in ("int8_share", "int8_share_all", "integer_weights"))
    if share == 0 and weights:
        return _tile("Integer weights", weights, phrases.share(weights), "of all weights; multiplied by float activations", None)
    return _tile(
        "int8 share",
        share,
        phrases.share(share),
        "of the MACs of weight GEMMs" + (f"; {phrases.share(all_share)} with attention" if all_share is not None else ""),
        variant.get("int8_share_reason"),
    )


def _tile(name: str, value: float | None, text: str, note: str, reason: str | None) -> View:
    return {"name": name, "known": value is not None, "text": text, "note": note if value is not None else reason or NO_REASON}


def _goal(goal: Report, metric: str | None) -> View:
    state = {True: "met", False: "missed"}.get(goal.get("met"), "open")  # type: ignore[arg-type]
    spread = phrases.change_interval(goal.get("low"), goal.get("high"), metric) if goal.get("goal") == "max_drop" else None
    reason = goal.get("reason") or (NO_REASON if goal.get("value") is None else None)
    return {
        "state": state,
        "key": goal.get("goal") or "",
        "name": phrases.goal_name(goal, metric),
        "value": phrases.goal_value(goal, metric),
        "spread": f"95 % {spread}" if spread else phrases.both_latencies(goal),
        "at": phrases.place(goal.get("at")),
        "reason": reason,
    }


def _sizes(report: Report, decision: Decision) -> list[View]:
    """Returns the sizes of what is served, first, and of every variant in its first engine."""
    served = {**decision.variant, "size_bytes": decision.size_bytes, "id": SERVED, "what": phrases.configuration(decision.names or {})}
    rows = [*([served] if decision.names else []), *report["variants"]]
    largest = max((v.get(key) or 0 for v in rows for key in ("size_bytes", "checkpoint_bytes")), default=0) or 1
    return [
        {
            "id": variant.get("id"),
            "what": variant.get("what") or phrases.built_in(variant),
            "bars": [
                {
                    "known": variant.get(key) is not None,
                    "text": phrases.size(variant.get(key)),
                    "percent": round(100 * (variant.get(key) or 0) / largest, 2),
                    "reason": reason,
                }
                for key, reason in (("size_bytes", "no engine was built for this variant"), ("checkpoint_bytes", NO_REASON))
            ],
            "parameters": phrases.count(variant.get("parameters")),
            "macs": phrases.count(variant.get("macs")),
        }
        for variant in rows
    ]


def _stages(report: Report) -> View:
    known = [stage.get("seconds") or 0 for stage in report["stages"]]
    longest = max(known, default=0) or 1
    rows = [
        {
            "id": stage.get("id") or "unnamed",
            "text": phrases.duration(stage.get("seconds")),
            "cached": bool(stage.get("cached")),
            "memory": phrases.size(stage["peak_memory_bytes"]) if stage.get("peak_memory_bytes") else NOT_MEASURED,
            "width": round(100 * (stage.get("seconds") or 0) / longest, 2),
        }
        for stage in report["stages"]
    ]
    return {"rows": rows, "total": phrases.duration(sum(known))}


def _environment_rows(report: Report) -> list[tuple[str, str]]:
    environment = report["environment"]
    rows = [(key, _surrounding(key, value)) for key, value in environment.items() if key != "versions"]
    rows += [(key, plain(value)) for key, value in report["target"].items() if value is not None]
    versions = environment.get("versions") or {}
    return [(_title(key), text) for key, text in rows] + [(key, plain(value)) for key, value in versions.items()]


def _title(key: str) -> str:
    words = re.sub(r"_bytes$", "", key).replace("_", " ")
    return words.upper() if words in ("cpu", "gpus") else words[:1].upper() + words[1:]


def _surrounding(key: str, value: Any) -> str:
    return phrases.size(value) if key.endswith("_bytes") else plain(value)
