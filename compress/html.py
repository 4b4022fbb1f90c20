"""The report as one HTML page: opens from disk, prints, needs no network, no script, and follows light and dark.

`render` turns the report (a plain dict, `report.json`) into sections of finished strings and positions; `report.html.j2` lays them out
beside `report.css` and `charts.j2`. The template escapes everything it prints: names come from users. What was not measured
is printed as such, with its reason; nothing is left blank and nothing is 0 that was not measured to be 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from compress import goals, tables, wording
from compress.pruning import pruning
from compress.sparsity import sparsity
from compress.wording import NO_REASON, NOT_MEASURED, engine_name

MANY_LAYERS = 60

LISTS = ("variants", "latency", "goals", "stages", "warnings", "commands", "models", "int8_layers", "layers", "gpus", "cpu_features")
MAPS = ("environment", "metric", "metrics", "accuracy", "drops", "triton", "versions", "target")

Report = Mapping[str, Any]
View = dict[str, Any]


def render(report: Report) -> str:
    """Returns the page of a report.

    Args:
        report: As in `report.json`; every part may be missing or None.

    Returns:
        One self-contained HTML document.
    """
    whole = complete(report)
    return _template().render(
        name=whole.get("name") or "unnamed run",
        facts=_facts(whole),
        verdict=wording.verdict(whole),
        goals_sentence=wording.goals_sentence(whole["goals"]),
        state=_state(whole["goals"]),
        figures=_figures(whole),
        goals=[_goal(goal, _metric(whole)) for goal in whole["goals"]],
        warnings=whole["warnings"],
        metric=_metric(whole),
        lower_is_better=whole["metric"].get("higher_is_better") is False,
        unit="tokens" if goals.is_relative(_metric(whole)) else "rows",
        plots=tables.plots(whole),
        ledger=tables.ledger(whole),
        others=tables.other_metrics(whole),
        shapes=tables.latency(whole),
        served=tables.served(whole),
        sizes=_sizes(whole),
        pruning=pruning(whole),
        sparsity=sparsity(whole),
        layers=_layers(whole),
        quantization=_quantization(whole),
        parity=_parity(whole),
        stages=_stages(whole),
        environment=_environment_rows(whole),
        recipe=whole.get("recipe"),
        commands=whole["commands"],
    )


def complete(value: Any) -> Any:
    """Returns a copy of a report in which every missing or null list is empty, and so is every map; values stay as they are."""
    report = _fill(value)
    for key in ("variants", "goals", "stages", "warnings", "commands"):
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
        filled = {key: empty[key] if item is None and key in empty else _fill(item) for key, item in value.items()}
        # a metric may be called as one of the maps is
        return filled | ({"metrics": value["metrics"]} if value.get("metrics") else {})
    return [_fill(item) for item in value if item is not None] if isinstance(value, list | tuple) else value


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2")


def _metric(report: Report) -> str:
    return str(report["metric"]["name"])


# The head: verdict, key figures, goals


def _facts(report: Report) -> list[str]:
    cpu = report["environment"].get("cpu")
    return [str(fact) for fact in (report.get("task"), report.get("created"), cpu) if fact]


def _state(judged: Sequence[Report]) -> str:
    if any(goal.get("met") is False for goal in judged):
        return "missed"
    return "met" if judged and all(goal.get("met") for goal in judged) else "open"


def _figures(report: Report) -> list[View]:
    last, metric = goals.last_variant(report), _metric(report)
    faster, cost = goals.speedup(report), goals.drop(report)
    hop = goals.last_hop(report)
    cell = (last.get("accuracy") or {}).get(hop) or {}
    spread = wording.interval(cell.get("low"), cell.get("high"), metric)
    lost = wording.change_interval(cost.low, cost.high, metric)
    before, share = goals.baseline(report).get("size_bytes"), last.get("int8_share")
    all_share = last.get("int8_share_all")
    return [
        _tile("Speed-up", faster.value, wording.ratio(faster.value), f"at the worst shape: {wording.place(faster.at)}", faster.reason),
        _tile(
            metric.capitalize(),
            cell.get("value"),
            wording.figure(cell.get("value"), metric),
            f"{engine_name(hop)}, n {'unknown' if cell.get('n') is None else cell['n']}" + (f", 95 % {spread}" if spread else ""),
            cell.get("reason"),
        ),
        _tile(
            "Change",
            cost.value,
            wording.change(cost.value, metric) or NOT_MEASURED,
            "against the baseline in torch" + (f", 95 % {lost}" if lost else ""),
            cost.reason,
        ),
        _tile(
            "Size to serve",
            last.get("size_bytes"),
            wording.size(last.get("size_bytes")),
            f"baseline {wording.size(before)}",
            "no engine was built",
        ),
        _tile(
            "int8 share",
            share,
            wording.share(share),
            f"of weight GEMMs; {wording.share(all_share)} with attention" if all_share is not None else "of weight GEMMs",
            last.get("int8_share_reason"),
        ),
    ]


def _tile(name: str, value: float | None, text: str, note: str, reason: str | None) -> View:
    return {"name": name, "known": value is not None, "text": text, "note": note if value is not None else reason or NO_REASON}


def _goal(goal: Report, metric: str | None) -> View:
    state = {True: "met", False: "missed"}.get(goal.get("met"), "open")  # type: ignore[arg-type]
    spread = wording.change_interval(goal.get("low"), goal.get("high"), metric) if goal.get("goal") == "max_drop" else None
    reason = goal.get("reason") or (NO_REASON if goal.get("value") is None else None)
    return {
        "state": state,
        "key": goal.get("goal") or "",
        "name": wording.goal_name(goal, metric),
        "value": wording.goal_value(goal, metric),
        "spread": f"95 % {spread}" if spread else None,
        "at": wording.place(goal.get("at")),
        "reason": reason,
    }


# Size, layers, parity


def _sizes(report: Report) -> list[View]:
    largest = max((v.get(key) or 0 for v in report["variants"] for key in ("size_bytes", "checkpoint_bytes")), default=0) or 1
    return [
        {
            "id": variant.get("id"),
            "bars": [
                {
                    "known": variant.get(key) is not None,
                    "text": wording.size(variant.get(key)),
                    "percent": round(100 * (variant.get(key) or 0) / largest, 2),
                    "reason": reason,
                }
                for key, reason in (("size_bytes", "no engine was built for this variant"), ("checkpoint_bytes", NO_REASON))
            ],
            "parameters": wording.count(variant.get("parameters")),
            "macs": wording.count(variant.get("macs")),
        }
        for variant in report["variants"]
    ]


def _layers(report: Report) -> list[View]:
    return [_layer_chart(variant) for variant in report["variants"] if variant.get("int8_share") or goals.is_quantized(variant)]


def _layer_chart(variant: Report) -> View:
    layers = variant["int8_layers"]
    total, largest = sum(layer.get("macs") or 0 for layer in layers), max((layer.get("macs") or 0 for layer in layers), default=0)
    rows = [
        {
            "name": layer.get("name") or "unnamed",
            "kind": layer.get("kind") or "GEMM",
            "precision": layer.get("precision") or "unknown",
            "int8": str(layer.get("precision")).startswith(("int8", "i8", "u8")),
            "percent": None if not total or layer.get("macs") is None else _percent(layer["macs"] / total),
            "width": round(100 * (layer.get("macs") or 0) / largest, 2) if largest else 0,
        }
        for layer in layers
    ]
    return {
        "id": variant.get("id"),
        "share": wording.share(variant.get("int8_share")),
        "share_all": wording.share(variant.get("int8_share_all")),
        "known": variant.get("int8_share") is not None,
        "reason": variant.get("int8_share_reason") or NO_REASON,
        "rows": rows,
        "many": len(rows) > MANY_LAYERS,
        "num_int8": sum(bool(row["int8"]) for row in rows),
    }


def _percent(part: float) -> str:
    return f"{100 * part:.1f}" if part >= 0.0005 or not part else "< 0.1"


def _quantization(report: Report) -> list[View]:
    """Returns for each quantized variant its settings and, where they were measured, its layers from the most sensitive on."""
    views = []
    for variant in report["variants"]:
        found = variant.get("quantization")
        if isinstance(found, Mapping):
            layers = _sensitivities(found.get("layers"))
            settings = [(key, _plain(value)) for key, value in found.items() if key != "layers" and _is_scalar(value)]
            scan, tried = found.get("sensitivity") or {}, found.get("attempts")
            views.append(
                {
                    "id": variant.get("id"),
                    "settings": settings,
                    "layers": layers,
                    "scan": _scan(scan.get("layers") or []),
                    "unit": wording.DISTANCES.get(str(scan.get("measure")), "distance"),
                    "attempts": _attempts(tried if isinstance(tried, list) else []),
                }
            )
    return views


def _scan(layers: list[Any]) -> list[View]:
    """Returns what every layer costs in int8, in the order of the scan: what float would win back, and what its parts cost alone."""
    top = max((abs(layer["gain"]) for layer in layers), default=0) or 1
    return [
        {
            "name": layer["name"],
            "width": round(100 * max(0.0, layer["gain"]) / top, 2),
            **{key: f"{layer[key]:.2e}" for key in ("gain", "alone", "weights", "inputs")},
        }
        for layer in layers
    ]


def _attempts(attempts: list[Any]) -> list[View]:
    """Returns what was tried before the variant was chosen: name, figure, price, and whether it was kept."""
    return [
        {
            "name": attempt.get("name") or "unnamed",
            "value": _plain(attempt.get("value")),
            "seconds": f"{attempt['seconds']:.1f} s" if attempt.get("seconds") is not None else "not measured",
            "kept": bool(attempt.get("kept")),
        }
        for attempt in attempts
    ]


def _sensitivities(layers: Any) -> list[View]:
    """Returns the signal-to-noise ratio of every layer's input codes, the smallest first; layers without one are left out."""
    items = layers if isinstance(layers, list) else []
    known = sorted((item for item in items if item.get("input_sqnr_db") is not None), key=lambda item: float(item["input_sqnr_db"]))
    top = max((item["input_sqnr_db"] for item in known), default=0) or 1
    return [
        {
            "name": item.get("name") or "unnamed",
            "input": f"{item['input_sqnr_db']:.1f}",
            "weight": f"{item['weight_sqnr_db']:.1f}" if item.get("weight_sqnr_db") is not None else None,
            "width": max(0, round(100 * item["input_sqnr_db"] / top, 2)),
        }
        for item in known
    ]


def _parity(report: Report) -> list[View]:
    views = []
    for variant in report["variants"]:
        found = variant.get("parity")
        for entry in found if isinstance(found, list) else [found] if found else []:
            layers = entry.get("layers") or []
            diverging = next((layer for layer in layers if _diverges(layer)), None)
            views.append(
                {
                    "id": variant.get("id"),
                    "engine": engine_name(entry.get("engine")) if entry.get("engine") else None,
                    "state": {True: "met", False: "missed"}.get(entry.get("passed"), "open"),
                    "disagreements": _or_unmeasured(entry.get("disagreements")),
                    "limit": entry.get("limit"),
                    "n": entry.get("n"),
                    "median": _or_unmeasured(entry.get("median_abs"), ".4f"),
                    "maximum": _or_unmeasured(entry.get("max_abs"), ".3f"),
                    "layers": f"{len(layers)} layers" if layers else NOT_MEASURED,
                    "codes": f"{sum(layer.get('codes') or 0 for layer in layers):,}",
                    "different": f"{sum(layer.get('different') or 0 for layer in layers):,}",
                    "diverging": diverging.get("layer") if diverging else None,
                }
            )
    return views


def _diverges(layer: Report) -> bool:
    """Whether a layer has codes that differ for no reason, or sums that are wrong."""
    return (layer.get("different") or 0) > (layer.get("allowed") or 0) or (layer.get("wrong_sums") or 0) > 0


def _or_unmeasured(value: float | None, style: str = ",") -> str:
    return NOT_MEASURED if value is None else format(value, style)


# Stages and surroundings


def _stages(report: Report) -> View:
    known = [stage.get("seconds") or 0 for stage in report["stages"]]
    longest = max(known, default=0) or 1
    rows = [
        {
            "id": stage.get("id") or "unnamed",
            "text": wording.duration(stage.get("seconds")),
            "cached": bool(stage.get("cached")),
            "memory": wording.size(stage["peak_memory_bytes"]) if stage.get("peak_memory_bytes") else NOT_MEASURED,
            "width": round(100 * (stage.get("seconds") or 0) / longest, 2),
        }
        for stage in report["stages"]
    ]
    return {"rows": rows, "total": wording.duration(sum(known))}


def _environment_rows(report: Report) -> list[tuple[str, str]]:
    environment = report["environment"]
    rows = [(key, _surrounding(key, value)) for key, value in environment.items() if key != "versions"]
    rows += [(key, _plain(value)) for key, value in report["target"].items() if value is not None]
    versions = environment.get("versions") or {}
    return [(_title(key), text) for key, text in rows] + [(key, _plain(value)) for key, value in versions.items()]


def _title(key: str) -> str:
    words = re.sub(r"_bytes$", "", key).replace("_", " ")
    return words.upper() if words in ("cpu", "gpus") else words[:1].upper() + words[1:]


def _surrounding(key: str, value: Any) -> str:
    return wording.size(value) if key.endswith("_bytes") else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "unknown" if value is None else str(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) or (isinstance(value, list) and all(isinstance(item, str | int | float) for item in value))
