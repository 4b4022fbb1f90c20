"""Adapters in the report: the judged metric of the rows of each, in every variant and backend, and how each was trained."""

from __future__ import annotations

from compress.report import phrases
from compress.report.model.contents import Contents
from compress.report.model.stages import TrainedAdapter
from compress.report.phrases import NOT_MEASURED, engine_name
from compress.report.view import View


def adapters(report: Contents) -> View | None:
    """Returns the tables; None for a run whose rows name no adapters."""
    rows = [
        {
            "name": name,
            "id": variant.id,
            "backend": engine_name(backend),
            "value": phrases.figure(cell.value, str(report.metric.name)),
            "spread": phrases.interval(cell.low, cell.high, str(report.metric.name)) or "",
            "n": phrases.rows(cell),
        }
        for variant in report.variants
        for backend, cells in variant.adapters.items()
        for name, cell in cells.items()
    ]
    rows.sort(key=lambda row: row["name"])
    return {"rows": rows, "trained": _trained(report)} if rows else None


def _trained(report: Contents) -> list[View]:
    """Returns how each adapter was trained."""
    found = [
        (name, TrainedAdapter.model_validate(figures))
        for variant in report.variants
        if variant.adapter_training
        for name, figures in variant.adapter_training["adapters"].items()
    ]
    return [
        {
            "name": name,
            "rows": phrases.count(one.rows),
            "parameters": phrases.count(one.parameters),
            "difference": NOT_MEASURED if one.difference is None else f"{one.difference:.1e}",
        }
        for name, one in found
    ]
