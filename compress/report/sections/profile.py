"""Profiles of trainings in the report: how fast steps were, what they waited for, and what lay in memory."""

from __future__ import annotations

from compress.report import phrases
from compress.report.charts.lines import LineChart, Series, line_chart
from compress.report.model.contents import Contents
from compress.report.model.stages import Profile
from compress.report.phrases import NOT_MEASURED
from compress.report.view import View, or_unmeasured, percent

UNKNOWN = "not known"


def profiles(report: Contents) -> list[View]:
    """Returns the profile of every training, in the order of the stages."""
    return [_view(stage.id, Profile.model_validate(one)) for stage in report.stages for one in stage.profiles]


def _view(stage: str, found: Profile) -> View:
    return {
        "name": stage if found.label == stage else f"{stage}: {found.label}",
        "rows": [(key, value) for key, value in _rows(found) if value is not None],
        "memory": _memory(found),
        "operations": [
            {"name": one.name, "percent": percent(one.share), "width": round(100 * one.share, 2), "calls": f"{one.calls:,}"}
            for one in found.operations
        ],
        "trace": found.trace,
    }


def _rows(found: Profile) -> list[tuple[str, str | None]]:
    used = NOT_MEASURED if found.utilisation is None else f"{percent(found.utilisation)} %"
    if found.gemm_flops_per_s:
        used += f" of {found.gemm_flops_per_s / 1e12:.3g} TFLOP/s, a large {found.precision} product on this {found.device}"
    return [
        ("Processes", str(found.processes)),
        ("Step", f"{or_unmeasured(found.step_ms, ',.1f')} ms over {found.timed_steps} steps"),
        ("Rows per second", or_unmeasured(found.rows_per_s, ",.1f")),
        ("Tokens per second", None if found.tokens_per_s is None else f"{found.tokens_per_s:,.0f}"),
        ("Padding", None if found.padding_share is None else f"{percent(found.padding_share)} % of the tokens that are computed"),
        ("Model FLOPs utilisation", used),
        ("Communication", None if found.processes == 1 else _share(found.communication_share)),
        ("Peak memory", UNKNOWN if found.peak_bytes is None else phrases.size(found.peak_bytes)),
    ]


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{percent(value)} % of the time of a step"


def _memory(found: Profile) -> LineChart | None:
    points = [(at_ms, size / 1e6) for at_ms, size in found.memory]
    return line_chart("MB", "ms", [Series("", "memory", points)]) if points else None
