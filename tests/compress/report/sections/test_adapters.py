"""Adapters in the report: a row for each adapter, variant and backend, and how each was trained."""

from __future__ import annotations

from typing import Any

from compress.report.sections.adapters import adapters
from tests.plain_reports import contents, render

CELLS = {"legal": {"value": 0.75, "low": 0.7, "high": 0.8, "n": 400}, "medical": {"value": None, "n": 12}}
TRAINED = {"adapters": {"legal": {"rows": 1200, "parameters": 56_000, "difference": 2e-6}, "medical": {"rows": 30, "parameters": 56_000}}}


def report(**last: Any) -> dict[str, Any]:
    base = {"id": "baseline", "adapters": {"torch": CELLS}}
    return {"metric": {"name": "accuracy"}, "variants": [base, {"id": "adapters", "adapters": {"torch": CELLS, "triton": CELLS}, **last}]}


def test_every_adapter_has_a_row_in_every_backend() -> None:
    view = adapters(contents(report(adapter_training=TRAINED)))
    assert view is not None
    assert [(row["name"], row["id"]) for row in view["rows"]] == [
        (name, variant) for name in ("legal", "medical") for variant in ("baseline", "adapters", "adapters")
    ]
    assert all("75.00" in row["value"] and row["n"] == "400" for row in view["rows"][:3])
    assert [(row["name"], row["difference"]) for row in view["trained"]] == [("legal", "2.0e-06"), ("medical", "not measured")]


def test_the_page_shows_adapters_only_where_there_are_some() -> None:
    page = render(report(adapter_training=TRAINED))
    assert 'id="adapters"' in page
    assert "medical" in page
    assert 'id="adapters"' not in render({"variants": [{"id": "baseline"}]})
