"""Profiles of trainings in the report: how fast steps were, what they waited for, and what lay in memory."""

from __future__ import annotations

from compress.report import phrases
from compress.report.charts.lines import LineChart, Series, line_chart
from compress.report.model.contents import Contents
from compress.report.phrases import NOT_MEASURED
from compress.report.view import View, or_unmeasured, percent
from foundation.artifacts.document import Figures

UNKNOWN = "not known"


def profiles(report: Contents) -> list[View]:
    """Returns the profile of every training, in the order of the stages."""
    return [_view(stage.id, one) for stage in report.stages for one in stage.profiles]


def _view(stage: str, found: Figures) -> View:
    return {
        "name": stage if found.get("label") == stage else f"{stage}: {found.get('label')}",
        "rows": [(key, value) for key, value in _rows(found) if value is not None],
        "memory": _memory(found),
        "operations": [
            {"name": one.get("name"), "percent": percent(one.get("share") or 0.0), "width": round(100 * (one.get("share") or 0.0), 2),
             "calls": f"{one.get('calls') or 0:,}"}
            for one in found.get("operations") or ()
        ],
        "trace": found.get("trace"),
    }  # fmt: skip


def _rows(found: Figures) -> list[tuple[str, str | None]]:
    share, speed, processes = found.get("utilisation"), found.get("gemm_flops_per_s"), found.get("processes") or 1
    used = NOT_MEASURED if share is None else f"{percent(share)} %"
    if speed:
        used += f" of {speed / 1e12:.3g} TFLOP/s, a large {found.get('precision')} product on this {found.get('device')}"
    padding = found.get("padding_share")
    return [
        ("Processes", str(processes)),
        ("Step", f"{or_unmeasured(found.get('step_ms'), ',.1f')} ms over {found.get('timed_steps')} steps"),
        ("Rows per second", or_unmeasured(found.get("rows_per_s"), ",.1f")),
        ("Tokens per second", None if found.get("tokens_per_s") is None else f"{found['tokens_per_s']:,.0f}"),
        ("Padding", None if padding is None else f"{percent(padding)} % of the tokens that are computed"),
        ("Model FLOPs utilisation", used),
        ("Communication", None if processes == 1 else _share(found.get("communication_share"))),
        ("Peak memory", UNKNOWN if found.get("peak_bytes") is None else phrases.size(found["peak_bytes"])),
    ]


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{percent(value)} % of the time of a step"


def _memory(found: Figures) -> LineChart | None:
    points = [(float(point[0]), float(point[1]) / 1e6) for point in found.get("memory") or () if len(point) > 1]
    return line_chart("MB", "ms", [Series("", "memory", points)]) if points else None
