"""What the report prints of a compacted variant."""

from __future__ import annotations

from typing import Any

from compress.report.sections.compact import compaction
from tests.plain_reports import contents, render

SIZES = {"hidden": 8, "vocabulary": 9, "heads": (4, 4), "key_value_heads": (4, 4), "ffn": (32, 32), "experts": (0, 0)}
FIGURES = {
    "unread": {"heads": 3, "neurons": 1500},
    "constant": {"heads": 0, "neurons": 20},
    "before": SIZES,
    "after": {**SIZES, "heads": (4, 1), "ffn": (7, 12)},
    "zeros": {"before": 0.8, "after": 0.125},
    "parameters": {"before": 22000, "after": 13000},
    "difference": 1.5e-6,
    "seconds": 0.52,
}


def of(**changes: Any) -> dict[str, Any]:
    return {"variants": [{"id": "baseline", "compaction": None}, {"id": "compact", "compaction": {**FIGURES, **changes}}]}


def test_what_was_removed_and_what_is_left() -> None:
    (view,) = compaction(contents(of()))
    assert view["blocks"] == [{"heads": "4 of 4", "neurons": "7 of 32"}, {"heads": "1 of 4", "neurons": "12 of 32"}]
    figures = dict(view["figures"])
    assert figures["never read"] == "3 heads, 1,500 neurons"
    assert figures["constant"] == "0 heads, 20 neurons"
    assert figures["zero weights"] == "12.5 % (before: 80.0 %)"
    assert figures["parameters"] == "13,000 (before: 22,000)"
    assert figures["outputs differ by"] == "1.5e-06 at most"


def test_the_page_has_a_section_only_where_something_was_compacted() -> None:
    assert 'id="compaction"' in render(of())
    assert 'id="compaction"' not in render({"variants": [{"id": "baseline", "compaction": None}]})
