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


def _view(stage: str, figures: Profile) -> View:
    return {
        "name": stage if figures.label == stage else f"{stage}: {figures.label}",
        "rows": [(key, value) for key, value in _rows(figures) if value is not None],
        "memory": _memory(figures),
        "operations": [
            {"name": one.name, "percent": percent(one.share), "width": round(100 * one.share, 2), "calls": f"{one.calls:,}"}
            for one in figures.operations
        ],
        "trace": figures.trace,
    }


def _rows(figures: Profile) -> list[tuple[str, str | None]]:
    used = NOT_MEASURED if figures.utilisation is None else f"{percent(figures.utilisation)} %"
    if figures.gemm_flops_per_s:
        used += f" of {figures.gemm_flops_per_s / 1e12:.3g} TFLOP/s, a large {figures.precision} product on this {figures.device}"
    return [
        ("Processes", str(figures.processes)),
        ("Step", f"{or_unmeasured(figures.step_ms, ',.1f')} ms over {figures.timed_steps} steps"),
        ("Rows per second", or_unmeasured(figures.rows_per_s, ",.1f")),
        ("Tokens per second", None if figures.tokens_per_s is None else f"{figures.tokens_per_s:,.0f}"),
        ("Padding", None if figures.padding_share is None else f"{percent(figures.padding_share)} % of the tokens that are computed"),
        ("Model FLOPs utilisation", used),
        ("Communication", None if figures.processes == 1 else _share(figures.communication_share)),
        ("Peak memory", UNKNOWN if figures.peak_bytes is None else phrases.size(figures.peak_bytes)),
    ]


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{percent(value)} % of the time of a step"


def _memory(figures: Profile) -> LineChart | None:
    points = [(at_ms, size / 1e6) for at_ms, size in figures.memory]
    return line_chart("MB", "ms", [Series("", "memory", points)]) if points else None
