"""Accuracy and latency in the report: the plots, accuracy by backend, latency tables and the Triton load tests.

Each function turns a completed report (`compress.report.page.complete`) into strings and positions for the template. Two figures share a
point or a row only if both were measured on the same artifact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.report import goals, phrases
from compress.report.charts import scatter
from compress.report.decision import Decision, decision_of
from compress.report.goals import FLOATS
from compress.report.phrases import NO_REASON, engine_name
from compress.report.sections import timings
from compress.report.view import Report, View
from foundation.core.engines import ENGINES, REFERENCE
from foundation.measure.metrics import METRICS
from foundation.measure.turns import ratio

NUM_QUANTILES = 21
"""0, 5, ... 100 %, see `foundation.measure.latency`."""
BACKENDS = (*ENGINES, "triton")


# Accuracy against latency


def plots(report: Report, decision: Decision) -> list[View]:
    """Returns for each shape its plot of the metric against latency (one for wide, one for narrow screens) and its legend."""
    all_points = {shape: [point_of(report, *one) for one in configurations_of(report, shape, decision)] for shape in shapes_of(report)}
    return [
        {"title": phrases.place(goals.shape_name(shape)), **plot(report["metric"], points, (440, 340))}
        for shape, points in all_points.items()
        if points
    ]


def plot(metric: Report, points: Sequence[scatter.Point], heights: tuple[int, int]) -> View:
    """Returns a plot of points, and its legend.

    Args:
        metric: `name` and `higher_is_better`, as in report.json.
        points: At least one.
        heights: Of the plots for wide and for narrow screens, pixels.
    """
    tick = (lambda value: f"{100 * value:.4g}%") if phrases.is_share(metric["name"]) else (lambda value: f"{value:.4g}")
    higher = metric.get("higher_is_better") is not False
    wide, narrow = (
        scatter.scatter(points, width, height, tick, all_labels=True, higher_is_better=higher)
        for width, height in zip((1040, 360), heights, strict=True)
    )
    engines = [engine for engine in BACKENDS if any(point.engine == engine for point in points)]
    legend = [{"name": engine_name(engine), "outline": scatter.marker(engine, 8, 8)} for engine in engines]
    return {"wide": wide, "narrow": narrow, "legend": legend}


def shapes_of(report: Report) -> list[goals.Shape]:
    """Returns the timed shapes, from small to large."""
    shapes = {(row.get("batch") or 1, row.get("sequence")) for variant in report["variants"] for row in variant["latency"]}
    return sorted(shapes, key=lambda shape: (shape[0], shape[1] or 0))


def configurations_of(report: Report, shape: goals.Shape, decision: Decision | None = None) -> list[tuple[Report, Report, Report]]:
    """Returns the configurations of one shape with both a measured latency and a measured accuracy, each in its recommended mode: variant,
    latency row, and accuracy. What is served is always one of them, in its own mode and float precision."""
    decision = decision_of(report) if decision is None else decision
    found: dict[tuple[Any, ...], tuple[Report, Report, Report]] = {}
    for variant in report["variants"]:
        for row in variant["latency"]:
            key = (variant.get("id"), row.get("engine"), row.get("precision"))
            cell, served = _accuracy_of(row, variant), decision.serves(row)
            cell = decision.accuracy.get(str(row.get("engine"))) or cell if served else cell
            if (row.get("batch") or 1, row.get("sequence")) == shape and row.get("p50_ms") and cell.get("value") is not None:
                kept = (variant, row, cell)
                found[key] = kept if served else found.get(key, kept)
    return list(found.values())


def _accuracy_of(row: Report, variant: Report) -> Report:
    """Returns the accuracy of exactly the timed configuration: its own, or the backend's if the precisions agree."""
    own = row.get("accuracy")
    if own:
        return dict(own)
    main = variant.get("precision") or next((r.get("precision") for r in variant["latency"] if r.get("precision") not in FLOATS), None)
    if row.get("engine") == REFERENCE:
        main = "fp32"
    cell = variant["accuracy"].get(row.get("engine")) or {}
    return cell if main in (None, row.get("precision")) else {}


def point_of(report: Report, variant: Report, row: Report, cell: Report) -> scatter.Point:
    """Returns the point of a configuration."""
    metric, served = report["metric"]["name"], any(row is one for one in goals.served_cells(report).values())
    name = f"{variant.get('id')} {engine_name(row.get('engine'))} {row.get('precision') or 'unknown precision'}"
    spread = phrases.interval(cell.get("low"), cell.get("high"), metric)
    title = f"{name}: {phrases.figure(cell['value'], metric)}" + (f" (95 % {spread})" if spread else "")
    title += f", p50 {phrases.milliseconds(row['p50_ms'])} ms, {_mode(row)}"
    reference = variant is goals.baseline(report) and (row.get("engine"), row.get("precision")) == (REFERENCE, "fp32")
    role = "served" if served else "reference" if reference else "other"
    label = f"{_short(str(variant.get('id')))} {engine_name(row.get('engine'))} {row.get('precision') or 'unknown precision'}"
    short = f"{_short(str(variant.get('id')), 12)} {row.get('precision') or ''}".strip()  # the marker tells the engine
    low, high, engine = cell.get("low"), cell.get("high"), str(row.get("engine"))
    return scatter.Point(row["p50_ms"], cell["value"], low, high, label, title, engine, role, short=short)


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."


def _mode(row: Report) -> str:
    parts = [
        row.get("mode"),
        f"float layers {row['float_precision']}" if row.get("float_precision") not in (None, row.get("precision")) else None,
        row.get("device"),
    ]
    parts += [f"{row['threads']} threads"] if row.get("threads") else []
    return ", ".join(str(part) for part in parts if part) or "unknown mode"


# Accuracy by backend


def ledger(report: Report, decision: Decision) -> View:
    """Returns the judged metric of every variant in every backend of the run, and of exactly what is served: `rows` of cells, and the
    reason that all cells of a column share."""
    metric, variants = report["metric"]["name"], report["variants"]
    found = [*(backend for variant in variants for backend in variant["accuracy"]), *decision.accuracy]
    backends = [*(one for one in BACKENDS if one in found), *dict.fromkeys(one for one in found if one not in BACKENDS)]
    ends = [
        cell[key]
        for known in (*(variant["accuracy"] for variant in variants), decision.accuracy)
        for cell in known.values()
        for key in ("low", "high", "value")
        if cell and cell.get(key) is not None
    ]
    scale = (min(ends), max(ends)) if ends else (0.0, 1.0)
    reference = (goals.baseline(report).get("accuracy") or {}).get(REFERENCE) or {}
    rows = [
        {
            "id": variant.get("id"),
            "note": _variant_note(report, variant),
            "cells": [cell_of(variant, backend, metric, scale, reference.get("value")) for backend in backends],
        }
        for variant in variants
    ]
    merged = [_merge([row["cells"][index] for row in rows]) for index in range(len(backends))]
    if decision.names:
        rows.append(_served_row(report, decision, backends, scale))
        merged = [None if cell["known"] else reason for cell, reason in zip(rows[-1]["cells"], merged, strict=True)]
    return {"backends": [engine_name(backend) for backend in backends], "rows": rows, "merged": merged, "flips": report.get("flips")}


def _served_row(report: Report, decision: Decision, backends: Sequence[str], scale: tuple[float, float]) -> View:
    """Returns the row of exactly what is served: variants stand with the recommended mode of each engine."""
    unserved = {backend: {"value": None, "reason": "what is served does not run there"} for backend in backends}
    own = {"accuracy": {**unserved, **decision.accuracy}, "drops": decision.drops}
    cells = [cell_of(own, backend, report["metric"]["name"], scale, decision.before.get("value")) for backend in backends]
    return {"id": "served", "note": phrases.configuration(decision.names), "cells": cells}


def _variant_note(report: Report, variant: Report) -> str:
    stages = " > ".join(str(stage) for stage in variant.get("stages") or ())
    return "baseline" if variant is goals.baseline(report) else stages if stages != variant.get("id") else ""


def cell_of(variant: Report, backend: str, metric: str | None, scale: tuple[float, float], reference: float | None) -> View:
    """Returns the metric of a variant in a backend with its interval and what it lost, as texts and as positions on `scale`; or the reason
    why it was not measured."""
    cell, drop = variant["accuracy"].get(backend) or {}, variant["drops"].get(backend) or {}
    if cell.get("value") is None:
        return {"known": False, "reason": cell.get("reason") or "not part of this run"}
    spread, changed = phrases.interval(cell.get("low"), cell.get("high"), metric), phrases.change(drop.get("difference"), metric)
    lost, gained = drop.get("right_to_wrong"), drop.get("wrong_to_right")
    return {
        "known": True,
        "value": phrases.figure(cell["value"], metric),
        "n": phrases.rows(cell),
        "spread": spread,
        "change": changed,
        "change_spread": phrases.change_interval(drop.get("low"), drop.get("high"), metric),
        "worse": (drop.get("low") or 0) > 0,
        "flips": f"{lost} lost, {gained} gained" if lost is not None and gained is not None else None,
        "at": scatter.position(cell["value"], *scale),
        "low": None if cell.get("low") is None else scatter.position(cell["low"], *scale),
        "high": None if cell.get("high") is None else scatter.position(cell["high"], *scale),
        "reference": None if reference is None else scatter.position(reference, *scale),
    }


def _merge(cells: Sequence[View]) -> str | None:
    """Returns the reason that all cells of a column share, so that it is printed once; else None."""
    reasons = {None if cell["known"] else str(cell["reason"]) for cell in cells}
    return reasons.pop() if len(reasons) == 1 and len(cells) > 1 else None


def other_metrics(report: Report, decision: Decision) -> View:
    """Returns the other metrics, one row for each variant and backend, with their changes against the baseline in torch."""
    lines: list[tuple[str, str, Report]] = []
    for variant in report["variants"]:
        nested = {backend: figures for backend, figures in variant["metrics"].items() if isinstance(figures, Mapping)}
        flat = {name: value for name, value in variant["metrics"].items() if not isinstance(value, Mapping)}
        lines += [(str(variant.get("id")), backend, figures) for backend, figures in ({REFERENCE: flat} if flat else nested).items()]
    names = [name for name in dict.fromkeys(name for *_, figures in lines for name in figures) if name != report["metric"]["name"]]
    before = next((figures for id_, backend, figures in lines if (id_, backend) == (str(report.get("baseline")), REFERENCE)), {})

    def changed(figures: Report, name: str) -> str:
        first, last = before.get(name), figures.get(name)
        if first is None or last is None or name not in METRICS or figures is before:
            return ""
        return phrases.change(METRICS[name].drop(first, last), name) or ""

    rows = [
        {
            "id": id_,
            "backend": engine_name(backend),
            "texts": [phrases.figure(figures.get(name), name) for name in names],
            "changes": [changed(figures, name) for name in names],
        }
        for id_, backend, figures in lines
    ]
    return {"names": names, "rows": rows if names else []}


def stored(report: Report) -> list[View]:
    """Returns what the vectors of each variant, in the last backend that has them, are worth in an index: one row for each form."""
    metric, rows = report["metric"]["name"], []
    for variant in report["variants"]:
        backends = [backend for backend in BACKENDS if backend in (variant.get("vectors") or {})]
        for backend in backends[-1:]:
            whole = variant["vectors"][backend]
            exact = {"value": (variant["metrics"].get(backend) or {}).get(metric), "top10_overlap": whole.get("top10_overlap")}
            for form, cell in {"float32": exact, **(whole.get("stored") or {})}.items():
                rows.append(
                    {
                        "id": str(variant.get("id")),
                        "backend": engine_name(backend),
                        "form": form,
                        "bytes": phrases.count(cell["bytes"]) if cell.get("bytes") else "",
                        "value": phrases.figure(cell.get("value"), metric),
                        "change": phrases.change(cell.get("difference"), metric) or "",
                        "spread": phrases.change_interval(cell.get("low"), cell.get("high"), metric) or "",
                        "overlap": phrases.share(cell.get("top10_overlap")),
                    }
                )
    return rows


# Latency


def latency(report: Report, decision: Decision) -> list[View]:
    """Returns for each shape a table of its timings, with the spread of the samples around their median."""
    return [_shape_table(report, shape, decision) for shape in shapes_of(report)]


def _shape_table(report: Report, shape: goals.Shape, decision: Decision) -> View:
    pairs = [(v, row) for v in report["variants"] for row in v["latency"] if (row.get("batch") or 1, row.get("sequence")) == shape]
    ends = [value / row["p50_ms"] for _, row in pairs for value in _samples(row)]
    scale = (min(ends) - 0.02, max(ends) + 0.02) if ends else (0.9, 1.1)
    ticks = [{"at": scatter.position(tick, *scale), "text": f"{tick:g}"} for tick in scatter.linear_ticks(scale[0], scale[1], 4) if ends]
    rows = [{**_latency_row(report, variant, row, shape, scale), "is_served": decision.serves(row)} for variant, row in pairs]
    return {"title": phrases.place(goals.shape_name(shape)), "rows": rows, "ticks": ticks}


def _samples(row: Report) -> list[float]:
    """Returns the 5, 25, 50, 75 and 95 % quantiles of the samples in ms; if they are unknown, the median four times and the p90."""
    if not row.get("p50_ms"):
        return []
    quantiles: list[Any] = row.get("quantiles_ms") or []
    if len(quantiles) == NUM_QUANTILES and None not in quantiles:
        return [quantiles[1], quantiles[5], row["p50_ms"], quantiles[15], quantiles[19]]
    return [*[row["p50_ms"]] * 4, row.get("p90_ms") or row["p50_ms"]]


def _latency_row(report: Report, variant: Report, row: Report, shape: goals.Shape, scale: tuple[float, float]) -> View:
    slow = goals.reference_cells(report, row.get("device")).get(shape)
    faster = ratio(slow, row).value if slow and row.get("p50_ms") else None
    few = f"{row['n']} samples; p99 needs 200" if row.get("n") else NO_REASON
    return {
        "id": variant.get("id"),
        "engine": engine_name(row.get("engine")),
        "precision": row.get("precision") or "unknown precision",
        "mode": _mode(row),
        "known": bool(row.get("p50_ms")),
        "reason": row.get("reason") or NO_REASON,
        "p50": phrases.milliseconds(row.get("p50_ms")),
        "p90": phrases.milliseconds(row.get("p90_ms")),
        "p99": phrases.milliseconds(row.get("p99_ms")) if row.get("p99_ms") else None,
        "few": few,
        "rate": phrases.rate(row.get("throughput_per_s")),
        "n": row.get("n"),
        "mark": timings.mark(row),
        "interval": timings.interval(row),
        "faster": phrases.ratio(faster) if faster else None,
        "is_reference": slow is row,
        "strip": _strip(row, scale),
    }


def _strip(row: Report, scale: tuple[float, float]) -> View | None:
    """Returns the quantiles of the samples relative to their median, as positions in percent of `scale`."""
    places = [scatter.position(value / row["p50_ms"], *scale) for value in _samples(row)]
    return dict(zip(("low", "left", "middle", "right", "high"), places, strict=True)) if places else None


def served(report: Report) -> View:
    """Returns the load tests of the models in Triton, or the reason why there are none."""
    models = [
        {
            "model": model.get("model") or "unnamed model",
            "what": " ".join(str(part) for part in (model.get("variant"), model.get("precision")) if part),
            "disagreements": model.get("disagreements"),
            "rows": [
                {
                    "concurrency": row.get("concurrency"),
                    **{key: phrases.milliseconds(row.get(f"{key}_ms")) for key in ("p50", "p90", "p99")},
                    "rate": phrases.rate(row.get("throughput_per_s")),
                    "n": row.get("n"),
                }
                for row in model.get("latency") or ()
            ],
            "reason": model.get("reason") or "no load test was run",
        }
        for model in report["triton"].get("models") or ()
    ]
    cells = [variant["accuracy"].get("triton") or {} for variant in report["variants"]]
    given = next((cell["reason"] for cell in reversed(cells) if cell.get("reason")), None)
    return {"models": models, "reason": report["triton"].get("reason") or given or "no server was started in this run"}
