"""The stage `prune` in the report: what was kept, its cost, and how it was chosen, trained and timed.

Each function turns figures of the manifest into strings and positions for the template; a figure that the manifest lacks is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from compress.report import phrases
from compress.report.charts.lines import LineChart, Series, line_chart
from compress.report.goals import shape_name
from compress.report.model.contents import Contents
from compress.report.view import View
from foundation.artifacts.document import Figures

NAMES = {"heads": "heads", "ffn": "neurons", "experts": "experts"}
UNITS = {"macs": "multiply-accumulates of the blocks", "parameters": "parameters of the blocks", "latency": "milliseconds of the blocks"}


def pruning(report: Contents) -> list[View]:
    """Returns a view for each variant that was pruned."""
    return [_view(variant.id, variant.pruning) for variant in report.variants if variant.pruning and variant.pruning.get("before")]


def _view(name: str, figures: Figures) -> View:
    scan = figures.get("sensitivity") or {}
    return {
        "id": name,
        "settings": _settings(figures),
        "blocks": _blocks(figures),
        "whole": _whole(figures),
        "costs": _costs(figures),
        "scans": _scans(scan, "distances", 0.0),
        "metrics": _scans(scan, "metrics", scan.get("whole")),
        "metric": scan.get("metric"),
        "scan_rows": scan.get("rows"),
        "unit": phrases.DISTANCES.get(str(scan.get("measure")), "distance"),
        "steps": [row for number, step in enumerate(figures.get("steps") or (), 1) for row in _step(number, step)],
        "latency": _latency(figures.get("latency") or {}),
        "loads": _loads(figures),
    }


def _settings(figures: Figures) -> list[tuple[str, str]]:
    taken = figures.get("sparsity")
    return [
        ("method", str(figures.get("method"))),
        (
            "removed",
            phrases.NOT_MEASURED if taken is None else f"{100 * taken:.1f} % of the {UNITS.get(str(figures.get('measure')), 'blocks')}",
        ),
    ]


def _blocks(figures: Figures) -> list[View]:
    """Returns for each block of the unpruned model how many of its heads, neurons and experts were kept."""
    before, after = figures["before"], figures["after"]
    place = {block: number for number, block in enumerate(figures.get("layers") or range(len(before["heads"])))}
    shown = [what for what in NAMES if any(before.get(what) or ())]
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
        for block in range(len(before["heads"]))
    ]


def _loads(figures: Figures) -> list[View]:
    """Returns the load of each expert before and after, by block; heights are relative to the busiest expert of the block."""
    routed = figures.get("loads") or {}
    before, after = routed.get("before") or [], routed.get("after") or []
    place = {block: number for number, block in enumerate(figures.get("layers") or range(len(before)))}

    def bars(shares: Sequence[float]) -> list[View]:
        most = max(shares, default=0) or 1
        return [
            {"height": round(100 * share / most, 1), "words": f"expert {number}: {100 * share:.1f} %"}
            for number, share in enumerate(shares)
        ]

    return [
        {"number": block, "before": bars(shares), "after": bars(after[place[block]] if block in place else [])}
        for block, shares in enumerate(before)
        if shares
    ]


def _whole(figures: Figures) -> list[str]:
    """Returns the model-wide dimensions that shrank and the tokens that leave on the way, as text."""
    before, after = figures["before"], figures["after"]
    names = {"hidden": "channels of the residual stream", "vocabulary": "tokens of the vocabulary"}
    shrunk = [f"{after[key]:,} of {before[key]:,} {name}" for key, name in names.items() if after.get(key) != before.get(key)]
    shares = after.get("tokens") or ()
    return [*shrunk, *([phrases.tokens_left(shares)] if shares else [])]


def _costs(figures: Figures) -> list[View]:
    cost, measure = figures.get("cost") or {}, str(figures.get("measure"))
    rows: list[tuple[str, Any, Any]] = [(UNITS.get(measure, "cost of the blocks"), cost.get("before"), cost.get("after"))]
    write = phrases.milliseconds if measure == "latency" else phrases.count
    return [
        {"name": name, "before": write(before), "after": write(after), "width": round(100 * after / before, 2)}
        for name, before, after in rows
        if before and after is not None
    ]


def _scans(scan: Figures, curve: str, start: float | None) -> list[LineChart]:
    """Returns a chart for each component: distance or metric, from `start`, against the removed share, one line for each block."""
    charts = []
    for what, name in NAMES.items():
        series = [
            Series(
                _block_of(entry["name"]),
                f"{entry['name']}: {entry[curve][-1][1]:.3g}",
                [*([] if start is None else [(0.0, start)]), *map(tuple, entry[curve])],
            )
            for entry in scan.get("layers") or ()
            if entry.get("what") == what and entry.get(curve)
        ]
        charts.append(line_chart(name, f"removed share of the {name} of one block", series, lambda share: f"{100 * share:.0f} %"))
    return [chart for chart in charts if chart is not None]


def _block_of(name: str) -> str:
    found = re.search(r"\d+", name)
    return found[0] if found else name


def _step(number: int, step: Figures) -> list[View]:
    """Returns the rows of one iteration: training of the masks, if they were learned, and recovery."""
    rows = []
    for what, history in (("masks", step.get("learned") or {}), ("recovery", step)):
        losses, looks = history.get("losses") or (), history.get("selection") or ()
        if losses or what == "recovery":
            kept = next(
                (look["value"] for look in looks if look["step"] == history.get("best_step")), looks[-1]["value"] if looks else None
            )
            share = 1 - history["sparsity"] if what == "masks" and "sparsity" in history else step.get("share")  # of the gates alone
            rows.append(
                {
                    "name": f"{number}, {what}",
                    "share": "" if share is None else f"{100 * share:.1f} %",
                    "steps": history.get("steps") or "none",
                    "losses": [f"{loss['loss']:.4g}" for loss in losses],
                    "parts": ", ".join(
                        f"{part} {value:.3g}" for part, value in (losses[-1] if losses else {}).items() if part not in ("epoch", "loss")
                    ),
                    "selection": "" if kept is None else f"{kept:.4f}",
                }
            )
    return rows


def _latency(latency: Figures) -> View | None:
    """Returns the measured latency table as charts, and the predicted and measured latency of each model."""
    if not latency:
        return None
    charts = [
        line_chart(
            "added latency of a block, ms",
            f"{NAMES[what]} of the block{' (groups that share keys and values)' if what == 'heads' else ''}",
            [Series("", f"{NAMES[what]} of a block", list(zip(latency[what]["counts"], latency[what]["ms"], strict=True)))],
        )
        for what in ("heads", "ffn")
    ]
    place = phrases.place(f"{latency['engine']} {latency['precision']}, " + shape_name((latency["batch"], latency["sequence"])))
    rounds: Sequence[Figures] = latency.get("rounds") or ()
    rows = [("before", latency.get("before") or {}, False)]
    rows += [
        (f"after, round {number}" if len(rounds) > 1 else "after", entry, entry == latency.get("after"))
        for number, entry in enumerate(rounds, 1)
    ]
    return {
        "place": place,
        "charts": [chart for chart in charts if chart is not None],
        "rest": phrases.milliseconds(latency["rest_ms"]),
        "block": phrases.milliseconds(latency["block_ms"]),
        "target": None if latency.get("asked_ms") is None else phrases.milliseconds(latency["asked_ms"]),
        "rows": [_timed(name, entry, kept, latency.get("asked_ms")) for name, entry, kept in rows if entry],
    }


def _timed(name: str, entry: Figures, kept: bool, target_ms: float | None) -> View:
    predicted, measured = entry["predicted_ms"], entry["measured_ms"]
    against = "" if target_ms is None or name == "before" else f"{100 * (measured / target_ms - 1):+.1f} %".replace("-", phrases.MINUS)
    return {
        "name": name,
        "kept": kept,
        "predicted": phrases.milliseconds(predicted),
        "measured": phrases.milliseconds(measured),
        "error": f"{100 * (predicted / measured - 1):+.1f} %".replace("-", phrases.MINUS),
        "against_target": against,
        "speedup": phrases.ratio(entry["speedup"]) if entry.get("speedup") else "",
    }
