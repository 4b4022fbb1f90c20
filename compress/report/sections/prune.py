"""The stage `prune` in the report: what was kept, its cost, and how it was chosen, trained and timed.

Each function turns figures of the manifest into strings and positions for the template; a figure that the manifest lacks is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from compress.report import phrases
from compress.report.charts.lines import LineChart, Series, line_chart
from compress.report.goals import shape_name
from compress.report.model.contents import Contents
from compress.report.model.stages import ComponentScan, EmbeddingFigures, Iteration, LatencyTable, Pruning, Sizes, Timed, Trained
from compress.report.view import View

NAMES = {"heads": "heads", "ffn": "neurons", "experts": "experts"}
UNITS = {"macs": "multiply-accumulates of the blocks", "parameters": "parameters of the blocks", "latency": "milliseconds of the blocks"}


def pruning(report: Contents) -> list[View]:
    """Returns a view for each variant that was pruned."""
    found = [(variant.id, Pruning.model_validate(variant.pruning)) for variant in report.variants if variant.pruning]
    return [_view(name, figures, figures.before) for name, figures in found if figures.before is not None]


def _view(name: str, figures: Pruning, before: Sizes) -> View:
    scan = figures.sensitivity
    return {
        "id": name,
        "settings": _settings(figures),
        "blocks": _blocks(figures, before),
        "whole": _whole(figures, before),
        "costs": _costs(figures),
        "scans": _scans([(layer, layer.distances) for layer in scan.layers], 0.0),
        "metrics": _scans([(layer, layer.metrics) for layer in scan.layers], scan.whole),
        "metric": scan.metric,
        "scan_rows": scan.rows,
        "unit": phrases.DISTANCES.get(str(scan.measure), "distance"),
        "steps": [row for number, step in enumerate(figures.steps, 1) for row in _step(number, step)],
        "latency": None if figures.latency is None or figures.latency.engine is None else _latency(figures.latency),
        "loads": _loads(figures),
    }


def _settings(figures: Pruning) -> list[tuple[str, str]]:
    removed = phrases.NOT_MEASURED
    if figures.sparsity is not None:
        removed = f"{100 * figures.sparsity:.1f} % of the {UNITS.get(str(figures.measure), 'blocks')}"
    return [("method", str(figures.method)), ("removed", removed)]


def _blocks(figures: Pruning, sizes: Sizes) -> list[View]:
    """Returns for each block of the unpruned model how many of its heads, neurons and experts were kept."""
    before, after = sizes.components, figures.after.components
    place = figures.places(len(sizes.heads))
    shown = [what for what in NAMES if any(before[what])]
    most = {what: max(before[what]) for what in shown}
    return [
        {
            "number": block,
            "gone": block not in place,
            "parts": [
                {
                    "what": NAMES[what],
                    "before": before[what][block],
                    "after": after[what][place[block]] if block in place else 0,
                    "width": round(100 * (after[what][place[block]] if block in place else 0) / most[what], 2),
                    "whole": round(100 * before[what][block] / most[what], 2),
                }
                for what in shown
            ],
        }
        for block in range(len(sizes.heads))
    ]


def bars(shares: Sequence[float]) -> list[View]:
    """Returns a bar for the load of each expert of a layer; heights are relative to the busiest one."""
    most = max(shares, default=0) or 1
    return [
        {"height": round(100 * share / most, 1), "words": f"expert {number}: {100 * share:.1f} %"} for number, share in enumerate(shares)
    ]


def _loads(figures: Pruning) -> list[View]:
    """Returns the load of each expert before and after, by block; heights are relative to the busiest expert of the block."""
    before, after = figures.loads.before, figures.loads.after
    place = figures.places(len(before))
    return [
        {"number": block, "before": bars(shares), "after": bars(after[place[block]] if block in place else [])}
        for block, shares in enumerate(before)
        if shares
    ]


def _whole(figures: Pruning, before: Sizes) -> list[str]:
    """Returns the model-wide dimensions that shrank and the tokens that leave on the way, as text."""
    after = figures.after
    sizes = [
        (before.hidden, after.hidden, "channels of the residual stream"),
        (before.vocabulary, after.vocabulary, "tokens of the vocabulary"),
    ]
    shrunk = [f"{new:,} of {old:,} {name}" for old, new, name in sizes if old is not None and new is not None and new != old]
    low = [] if figures.embeddings is None else [_low_rank(figures.embeddings)]
    return [*shrunk, *low, *([phrases.tokens_left(after.tokens)] if after.tokens else [])]


def _low_rank(embeddings: EmbeddingFigures) -> str:
    """Describes embeddings in low rank."""
    parts = [f"embeddings of rank {embeddings.rank}"]
    if (new := embeddings.parameters.after) is not None and (old := embeddings.parameters.before) is not None:
        parts.append(f"{new:,.0f} of {old:,.0f} parameters")
    if embeddings.relative_error is not None:
        parts.append(f"relative error {100 * embeddings.relative_error:.1f} %")
    return ", ".join(parts)


def _costs(figures: Pruning) -> list[View]:
    measure, before, after = str(figures.measure), figures.cost.before, figures.cost.after
    if not before or after is None:
        return []
    write = phrases.milliseconds if measure == "latency" else phrases.count
    name = UNITS.get(measure, "cost of the blocks")
    return [{"name": name, "before": write(before), "after": write(after), "width": round(100 * after / before, 2)}]


def _scans(curves: Sequence[tuple[ComponentScan, Sequence[tuple[float, float]]]], start: float | None) -> list[LineChart]:
    """Returns a chart for each component: distance or metric, from `start`, against the removed share, one line for each block."""
    charts = []
    for what, name in NAMES.items():
        series = [
            Series(
                _block_of(layer.name),
                f"{layer.name}: {curve[-1][1]:.3g}",
                [*([] if start is None else [(0.0, float(start))]), *curve],
            )
            for layer, curve in curves
            if layer.what == what and curve
        ]
        charts.append(line_chart(name, f"removed share of the {name} of one block", series, lambda share: f"{100 * share:.0f} %"))
    return [chart for chart in charts if chart is not None]


def _block_of(name: str) -> str:
    found = re.search(r"\d+", name)
    return found[0] if found else name


def _step(number: int, step: Iteration) -> list[View]:
    """Returns the rows of one iteration: training of the masks, if they were learned, and recovery."""
    rows = [_training(f"{number}, recovery", step, step.share)]
    if step.learned is not None and step.learned.losses:
        gates = step.learned.sparsity
        rows.insert(0, _training(f"{number}, masks", step.learned, step.share if gates is None else 1 - gates))
    return rows


def _training(name: str, history: Trained, share: float | None) -> View:
    """Returns the row of a training.

    Args:
        name: Its name.
        history: Its losses and metrics.
        share: Share that is removed after it.
    """
    losses, looks = history.losses, history.selection
    best = next((look.value for look in looks if look.step == history.best_step), looks[-1].value if looks else None)
    last = losses[-1] if losses else {}
    return {
        "name": name,
        "share": "" if share is None else f"{100 * share:.1f} %",
        "steps": history.steps if history.steps else "none",
        "losses": [f"{loss['loss']:.4g}" for loss in losses],
        "parts": ", ".join(f"{part} {value:.3g}" for part, value in last.items() if part not in ("epoch", "loss")),
        "selection": "" if best is None else f"{best:.4f}",
    }


def _latency(latency: LatencyTable) -> View:
    """Returns the measured latency table as charts, and the predicted and measured latency of each model."""
    charts = [
        line_chart(
            "added latency of a block, ms",
            f"{NAMES[what]} of the block{' (groups that share keys and values)' if what == 'heads' else ''}",
            [Series("", f"{NAMES[what]} of a block", list(zip(table.counts, table.ms, strict=True)))],
        )
        for what, table in (("heads", latency.heads), ("ffn", latency.ffn))
    ]
    place = phrases.place(f"{latency.engine} {latency.precision}, " + shape_name((latency.batch, latency.sequence)))
    rows = [] if latency.before is None else [_timed("before", latency.before, False, None)]
    for number, entry in enumerate(latency.rounds, 1):
        name = f"after, round {number}" if len(latency.rounds) > 1 else "after"
        rows.append(_timed(name, entry, entry == latency.after, latency.asked_ms))
    return {
        "place": place,
        "charts": [chart for chart in charts if chart is not None],
        "rest": phrases.milliseconds(latency.rest_ms),
        "block": phrases.milliseconds(latency.block_ms),
        "target": None if latency.asked_ms is None else phrases.milliseconds(latency.asked_ms),
        "rows": rows,
    }


def _timed(name: str, entry: Timed, is_chosen: bool, target_ms: float | None) -> View:
    predicted, measured = entry.predicted_ms, entry.measured_ms
    against = "" if target_ms is None else f"{100 * (measured / target_ms - 1):+.1f} %".replace("-", phrases.MINUS)
    return {
        "name": name,
        "kept": is_chosen,
        "predicted": phrases.milliseconds(predicted),
        "measured": phrases.milliseconds(measured),
        "error": f"{100 * (predicted / measured - 1):+.1f} %".replace("-", phrases.MINUS),
        "against_target": against,
        "speedup": phrases.ratio(entry.speedup) if entry.speedup else "",
    }
