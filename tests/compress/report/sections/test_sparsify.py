"""What the report prints of a variant with zeros, and of the load of experts."""

from __future__ import annotations

from typing import Any

from compress.report.sections.prune import pruning
from compress.report.sections.sparsify import sparsity
from tests.plain_reports import contents, render

LAYER = {"name": "encoder.layer.0.output.dense", "weights": 200, "zeros": 50, "sparsity": 0.25, "outputs": 3, "inputs": 0}
GROUPS = {
    "metric": "curvature",
    "quantiles": [0.0, 0.5, 1.0],
    "before": {"encoder.layer.0.output.dense": [0.1, 0.2, 0.3]},
    "after": {"encoder.layer.0.output.dense": [0.001, 0.02, 0.3]},
}


def variant(**changes: Any) -> dict[str, Any]:
    figures = {"method": "lasso", "pattern": "block 4 x 4", "asked": 0.25, "sparsity": 0.25, "speed": "no speed is claimed"}
    figures |= {"layers": [LAYER], "unread": {"heads": 1, "neurons": 7}, **changes}
    return {"variants": [{"id": "baseline", "sparsity": None}, {"id": "sparsify", "sparsity": figures}]}


def test_each_layer_says_how_many_zeros_it_has() -> None:
    (view,) = sparsity(contents(variant()))
    assert view["layers"] == [
        {"name": "encoder.layer.0.output.dense", "share": "25.0 %", "width": 25.0, "blocks": "", "outputs": 3, "inputs": 0}
    ]
    assert ("zero weights", "25.0 %") in view["settings"]
    assert ("without effect", "1 heads, 7 neurons") in view["settings"]
    assert view["groups"] == []


def test_blocks_and_groups_are_told_where_there_are_some() -> None:
    (view,) = sparsity(contents(variant(groups=GROUPS, layers=[{**LAYER, "blocks": 1250, "zero_blocks": 312}])))
    assert view["layers"][0]["blocks"] == "312 of 1,250"
    assert ("metric of the groups", "curvature") in view["settings"]
    (earlier,) = sparsity(contents(variant(groups={name: value for name, value in GROUPS.items() if name != "metric"})))
    assert "metric of the groups" not in dict(earlier["settings"])
    assert view["quantiles"] == ["0.0 %", "50.0 %", "100.0 %"]
    assert view["groups"] == [{"name": "encoder.layer.0.output.dense", "before": ["0.1", "0.2", "0.3"], "after": ["0.001", "0.02", "0.3"]}]


def test_loads_are_bars_of_the_busiest_expert() -> None:
    sizes = {"hidden": 8, "vocabulary": 9, "heads": (2, 2), "key_value_heads": (2, 2), "ffn": (4, 4), "experts": (2, 2)}
    figures = {
        "before": sizes,
        "after": {**sizes, "experts": (1,)},
        "layers": [1],
        "loads": {"before": [[0.75, 0.25], [0.5, 0.5]], "after": [[1.0]]},
    }
    (view,) = pruning(
        contents({"variants": [{"id": "prune", "pruning": {**figures, "after": {**sizes, "heads": (2,), "ffn": (4,), "experts": (1,)}}}]})
    )
    assert view["loads"] == [
        {
            "number": 0,
            "before": [{"height": 100.0, "words": "expert 0: 75.0 %"}, {"height": 33.3, "words": "expert 1: 25.0 %"}],
            "after": [],
        },
        {
            "number": 1,
            "before": [{"height": 100.0, "words": "expert 0: 50.0 %"}, {"height": 100.0, "words": "expert 1: 50.0 %"}],
            "after": [{"height": 100.0, "words": "expert 0: 100.0 %"}],
        },
    ]


def test_the_page_has_the_section_where_there_are_zeros() -> None:
    page = render(variant(groups=GROUPS))
    assert '<section id="sparsity">' in page
    assert "No speed is claimed." in page
    assert "encoder.layer.0.output.dense" in page
    assert "Root mean square of the weight groups before and after" in page
    assert 'id="sparsity"' not in render({"variants": [{"id": "baseline", "sparsity": None}]})


def test_the_latency_that_was_asked_for_is_shown() -> None:
    timed = {"engine": "openvino", "asked_ms": 12.0, "after": {"predicted_ms": 11.0, "measured_ms": 11.5, "speedup": 3.1}}
    (view,) = sparsity(contents(variant(latency=timed)))
    words = dict(view["settings"])["latency after compaction"]
    assert "11.5" in words
    assert "12" in words
    (without,) = sparsity(contents(variant()))
    assert "latency after compaction" not in dict(without["settings"])
