"""Accuracy and latency in the report: the plots, accuracy by backend, latency tables and the load tests of the server.

Each function turns a report into strings and positions for the template. Two figures share a
point or a row only if both were measured on the same artifact.
"""

from __future__ import annotations

from collections.abc import Sequence

from compress.report import goals, phrases
from compress.report.charts import scatter
from compress.report.decision import Decision, decision_of
from compress.report.goals import FLOATS
from compress.report.model.contents import Contents, JudgedMetric, Served
from compress.report.model.variant import Latency, StoredVectors, TimedAccuracy, Variant
from compress.report.phrases import NO_REASON, engine_name
from compress.report.sections import timings
from compress.report.view import View
from foundation.artifacts.figures import Accuracy, Drop, Metrics
from foundation.core.engines import ENGINES, REFERENCE, SERVERS
from foundation.measure.metrics import METRICS
from foundation.measure.turns import ratio

NUM_QUANTILES = 21
"""0, 5, ... 100 %, see `foundation.measure.latency`."""
BACKENDS = (*ENGINES, *SERVERS)


# Accuracy against latency


def plots(report: Contents, decision: Decision) -> list[View]:
    """Returns for each shape its plot of the metric against latency (one for wide, one for narrow screens) and its legend."""
    all_points = {shape: [point_of(report, *one) for one in configurations_of(report, shape, decision)] for shape in shapes_of(report)}
    return [
        {"title": phrases.place(goals.shape_name(shape)), **plot(report.metric, points, (440, 340))}
        for shape, points in all_points.items()
        if points
    ]


def plot(metric: JudgedMetric, points: Sequence[scatter.Point], heights: tuple[int, int]) -> View:
    """Returns a plot of points, and its legend.

    Args:
        metric: The metric of the vertical axis.
        points: At least one.
        heights: Heights of the plots for wide and for narrow screens, pixels.
    """
    tick = (lambda value: f"{100 * value:.4g}%") if phrases.is_share(metric.name) else (lambda value: f"{value:.4g}")
    higher = metric.higher_is_better is not False
    wide, narrow = (
        scatter.scatter(points, width, height, tick, all_labels=True, higher_is_better=higher)
        for width, height in zip((1040, 360), heights, strict=True)
    )
    engines = [engine for engine in BACKENDS if any(point.engine == engine for point in points)]
    legend = [{"name": engine_name(engine), "outline": scatter.marker(engine, 8, 8)} for engine in engines]
    return {"wide": wide, "narrow": narrow, "legend": legend}


def shapes_of(report: Contents) -> list[goals.Shape]:
    """Returns the timed shapes, from small to large."""
    shapes = {row.shape for variant in report.variants for row in variant.latency}
    return sorted(shapes, key=lambda shape: (shape[0], shape[1] or 0))


def configurations_of(
    report: Contents, shape: goals.Shape, decision: Decision | None = None
) -> list[tuple[Variant, Latency, TimedAccuracy | Accuracy]]:
    """Returns the configurations of one shape with both a measured latency and a measured accuracy, each in its recommended mode: variant,
    latency row, and accuracy. What is served is always one of them, in its own mode and float precision."""
    decision = decision_of(report) if decision is None else decision
    found: dict[tuple[str | None, ...], tuple[Variant, Latency, TimedAccuracy | Accuracy]] = {}
    for variant in report.variants:
        for row in variant.latency:
            key = (variant.id, row.engine, row.precision)
            cell, served = _accuracy_of(row, variant), decision.serves(row)
            cell = decision.accuracy.get(str(row.engine), cell) if served else cell
            if row.shape == shape and row.p50_ms and cell.value is not None:
                kept = (variant, row, cell)
                found[key] = kept if served else found.get(key, kept)
    return list(found.values())


def _accuracy_of(row: Latency, variant: Variant) -> TimedAccuracy | Accuracy:
    """Returns the accuracy of exactly the timed configuration: its own, or the backend's if the precisions agree."""
    if row.accuracy is not None:
        return row.accuracy
    main = variant.precision or next((other.precision for other in variant.latency if other.precision not in FLOATS), None)
    if row.engine == REFERENCE:
        main = "fp32"
    return variant.accuracy.get(str(row.engine), Accuracy()) if main in (None, row.precision) else Accuracy()


def point_of(report: Contents, variant: Variant, row: Latency, cell: TimedAccuracy | Accuracy) -> scatter.Point:
    """Returns the point of a configuration that has a time and a metric."""
    metric, served = report.metric.name, any(row is one for one in goals.served_cells(report).values())
    assert cell.value is not None, "a configuration has a metric"
    assert row.p50_ms is not None, "a configuration has a time"
    kind = f"{engine_name(row.engine)} {row.precision or 'unknown precision'}"
    spread = phrases.interval(cell.low, cell.high, metric)
    title = f"{variant.id} {kind}: {phrases.figure(cell.value, metric)}" + (f" (95 % {spread})" if spread else "")
    title += f", p50 {phrases.milliseconds(row.p50_ms)} ms, {_mode(row)}"
    reference = variant is goals.baseline(report) and (row.engine, row.precision) == (REFERENCE, "fp32")
    role = "served" if served else "reference" if reference else "other"
    short = f"{_short(variant.id, 12)} {row.precision or ''}".strip()  # the marker shows the engine
    label = f"{_short(variant.id)} {kind}"
    return scatter.Point(row.p50_ms, cell.value, cell.low, cell.high, label, title, str(row.engine), role, short=short)


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."


def _mode(row: Latency) -> str:
    parts = [
        row.mode,
        f"float layers {row.float_precision}" if row.float_precision not in (None, row.precision) else None,
        row.device,
        f"{row.threads} threads" if row.threads else None,
    ]
    return ", ".join(part for part in parts if part) or "unknown mode"


# Accuracy by backend


def ledger(report: Contents, decision: Decision) -> View:
    """Returns the judged metric of every variant in every backend of the run, and of exactly what is served: `rows` of cells, and the
    reason that all cells of a column share."""
    metric, variants = report.metric.name, report.variants
    found = [*(backend for variant in variants for backend in variant.accuracy), *decision.accuracy]
    backends = [*(one for one in BACKENDS if one in found), *dict.fromkeys(one for one in found if one not in BACKENDS)]
    ends = [
        end
        for known in (*(variant.accuracy for variant in variants), decision.accuracy)
        for cell in known.values()
        for end in (cell.low, cell.high, cell.value)
        if end is not None
    ]
    scale = (min(ends), max(ends)) if ends else (0.0, 1.0)
    reference = goals.before(report).value
    rows: list[View] = [
        {
            "id": variant.id,
            "note": _variant_note(report, variant),
            "cells": [
                cell_of(variant.accuracy.get(backend, Accuracy()), variant.drops.get(backend, Drop()), metric, scale, reference)
                for backend in backends
            ],
        }
        for variant in variants
    ]
    merged = [_merge([row["cells"][index] for row in rows]) for index in range(len(backends))]
    if decision.served is not None:
        rows.append(_served_row(decision, decision.served, backends, scale))
        merged = [None if cell["known"] else reason for cell, reason in zip(rows[-1]["cells"], merged, strict=True)]
    return {"backends": [engine_name(backend) for backend in backends], "rows": rows, "merged": merged, "flips": report.flips}


def _served_row(decision: Decision, served: Served, backends: Sequence[str], scale: tuple[float, float]) -> View:
    """Returns the row of exactly the served configuration: variants are listed with the recommended mode of each engine."""
    absent = Accuracy(value=None, reason="what is served does not run there")
    cells = [
        cell_of(decision.accuracy.get(one, absent), decision.drops.get(one, Drop()), decision.metric, scale, decision.before.value)
        for one in backends
    ]
    return {"id": "served", "note": phrases.configuration(served), "cells": cells}


def _variant_note(report: Contents, variant: Variant) -> str:
    stages = " > ".join(variant.stages)
    return "baseline" if variant is goals.baseline(report) else stages if stages != variant.id else ""


def cell_of(cell: Accuracy, drop: Drop, metric: str | None, scale: tuple[float, float], reference: float | None) -> View:
    """Returns the metric of a variant in a backend with its interval and what it lost, as texts and as positions on `scale`; or the reason
    why it was not measured."""
    if cell.value is None:
        return {"known": False, "reason": cell.reason or "not part of this run"}
    lost, gained = drop.right_to_wrong, drop.wrong_to_right
    return {
        "known": True,
        "value": phrases.figure(cell.value, metric),
        "n": phrases.rows(cell),
        "spread": phrases.interval(cell.low, cell.high, metric),
        "change": phrases.change(drop.difference, metric),
        "change_spread": phrases.change_interval(drop.low, drop.high, metric),
        "worse": (drop.low or 0) > 0,
        "flips": f"{lost} lost, {gained} gained" if lost is not None and gained is not None else None,
        "at": scatter.position(cell.value, *scale),
        "low": None if cell.low is None else scatter.position(cell.low, *scale),
        "high": None if cell.high is None else scatter.position(cell.high, *scale),
        "reference": None if reference is None else scatter.position(reference, *scale),
    }


def _merge(cells: Sequence[View]) -> str | None:
    """Returns the reason that all cells of a column share, so that it is printed once; else None."""
    reasons = {None if cell["known"] else str(cell["reason"]) for cell in cells}
    return reasons.pop() if len(reasons) == 1 and len(cells) > 1 else None


def other_metrics(report: Contents, decision: Decision) -> View:
    """Returns the other metrics, one row for each variant and backend, with their changes against the baseline in torch."""
    lines = [(variant.id, backend, figures) for variant in report.variants for backend, figures in variant.metrics.items()]
    names = [name for name in dict.fromkeys(name for *_, figures in lines for name in figures) if name != report.metric.name]
    before = next((figures for id_, backend, figures in lines if (id_, backend) == (report.baseline, REFERENCE)), {})

    def changed(figures: Metrics, name: str) -> str:
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


def stored(report: Contents) -> list[View]:
    """Returns the quality of each variant's vectors in an index, one row for each stored form; from the last backend that has them."""
    metric, rows = report.metric.name, []
    for variant in report.variants:
        vectors = variant.vectors or {}
        for backend in [backend for backend in BACKENDS if backend in vectors][-1:]:
            whole = vectors[backend]
            exact = StoredVectors(value=variant.metrics.get(backend, {}).get(metric), top10_overlap=whole.top10_overlap)
            for form, cell in {"float32": exact, **whole.stored}.items():
                rows.append(
                    {
                        "id": variant.id,
                        "backend": engine_name(backend),
                        "form": form,
                        "bytes": phrases.count(cell.bytes) if cell.bytes else "",
                        "value": phrases.figure(cell.value, metric),
                        "change": phrases.change(cell.difference, metric) or "",
                        "spread": phrases.change_interval(cell.low, cell.high, metric) or "",
                        "overlap": phrases.share(cell.top10_overlap),
                    }
                )
    return rows


def confidence(report: Contents) -> list[View]:
    """Returns how well each variant's margin ranks the rows that the baseline answers otherwise, in the last backend that has them."""
    rows = []
    for variant in report.variants:
        known = variant.confidence or {}
        for backend in [backend for backend in BACKENDS if backend in known][-1:]:
            cell = known[backend]
            rows.append(
                {
                    "id": variant.id,
                    "backend": engine_name(backend),
                    "disagreement": phrases.share(cell.disagreement),
                    "auroc": "no row differs" if cell.auroc is None else f"{cell.auroc:.3f}",
                    "aurc": "" if cell.aurc is None else f"{cell.aurc:.4f}",
                }
            )
    return rows


# Latency


def latency(report: Contents, decision: Decision) -> list[View]:
    """Returns for each shape a table of its timings, with the spread of the samples around their median."""
    return [_shape_table(report, shape, decision) for shape in shapes_of(report)]


def _shape_table(report: Contents, shape: goals.Shape, decision: Decision) -> View:
    pairs = [(variant, row) for variant in report.variants for row in variant.latency if row.shape == shape]
    ends = [value for _, row in pairs for value in _samples(row)]
    scale = (min(ends) - 0.02, max(ends) + 0.02) if ends else (0.9, 1.1)
    ticks = [{"at": scatter.position(tick, *scale), "text": f"{tick:g}"} for tick in scatter.linear_ticks(scale[0], scale[1], 4) if ends]
    rows = [{**_latency_row(report, variant, row, shape, scale), "is_served": decision.serves(row)} for variant, row in pairs]
    return {"title": phrases.place(goals.shape_name(shape)), "rows": rows, "ticks": ticks}


def _samples(row: Latency) -> list[float]:
    """Returns the 5, 25, 50, 75 and 95 % quantiles of the samples relative to their median; if they are unknown, 1 four times and the
    p90."""
    if not row.p50_ms:
        return []
    known = [value for value in row.quantiles_ms if value is not None]
    if len(row.quantiles_ms) == len(known) == NUM_QUANTILES:
        samples = [known[1], known[5], row.p50_ms, known[15], known[19]]
    else:
        samples = [*[row.p50_ms] * 4, row.p90_ms or row.p50_ms]
    return [value / row.p50_ms for value in samples]


def _latency_row(report: Contents, variant: Variant, row: Latency, shape: goals.Shape, scale: tuple[float, float]) -> View:
    slow = goals.reference_cells(report, row.device).get(shape)
    faster = ratio(slow, row).value if slow and row.p50_ms else None
    return {
        "id": variant.id,
        "engine": engine_name(row.engine),
        "precision": row.precision or "unknown precision",
        "mode": _mode(row),
        "known": bool(row.p50_ms),
        "reason": row.reason or NO_REASON,
        "p50": phrases.milliseconds(row.p50_ms),
        "p90": phrases.milliseconds(row.p90_ms),
        "p99": phrases.milliseconds(row.p99_ms) if row.p99_ms else None,
        "few": f"{row.n} samples; p99 needs 200" if row.n else NO_REASON,
        "rate": phrases.rate(row.throughput_per_s),
        "n": row.n,
        "mark": timings.mark(row),
        "interval": timings.interval(row),
        "faster": phrases.ratio(faster) if faster else None,
        "is_reference": slow is row,
        "strip": _strip(row, scale),
    }


def _strip(row: Latency, scale: tuple[float, float]) -> View | None:
    """Returns the quantiles of the samples relative to their median, as positions in percent of `scale`."""
    places = [scatter.position(value, *scale) for value in _samples(row)]
    return dict(zip(("low", "left", "middle", "right", "high"), places, strict=True)) if places else None


def served(report: Contents) -> View:
    """Returns the load tests of the models in their server, or the reason why there are none."""
    models = [
        {
            "model": model.model or "unnamed model",
            "what": " ".join(part for part in (model.variant, model.precision) if part),
            "disagreements": model.disagreements,
            "rows": [
                {
                    "concurrency": row.concurrency,
                    "p50": phrases.milliseconds(row.p50_ms),
                    "p90": phrases.milliseconds(row.p90_ms),
                    "p99": phrases.milliseconds(row.p99_ms),
                    "few": "" if row.p99_ms else f"{row.n} requests; p99 needs 200" if row.n else NO_REASON,
                    "rate": phrases.rate(row.throughput_per_s),
                    "n": row.n,
                }
                for row in model.latency
            ],
            "reason": model.reason or "no load test was run",
        }
        for model in (*report.triton.models, *([] if report.triton.cascade is None else [report.triton.cascade]))
    ]
    reasons = [variant.accuracy.get(name, Accuracy()).reason for variant in reversed(report.variants) for name in SERVERS]
    given = next((reason for reason in reasons if reason), None)
    names = dict.fromkeys(model.server for model in report.triton.models) or SERVERS
    reason = report.triton.reason or given or "no server was started in this run"
    return {"models": models, "servers": " and ".join(map(phrases.engine_name, names)), "reason": reason}
