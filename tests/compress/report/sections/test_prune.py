"""What the report prints of a pruned variant."""

from __future__ import annotations

from typing import Any

import pytest

from compress.report.sections.prune import pruning
from tests.plain_reports import contents, render

SIZES = {"hidden": 64, "vocabulary": 500, "heads": (4, 4, 4), "key_value_heads": (4, 4, 4), "ffn": (256, 256, 128), "experts": (0, 0, 0)}
SCAN = [
    {
        "name": f"encoder.layer.{block}.output.dense",
        "what": what,
        "distances": [[0.25, 0.01], [0.5, 0.1 + block], [1.0, 0.9 + block]],
        "metrics": [[0.25, 0.9], [0.5, 0.8], [1.0, 0.7 - 0.1 * block]],
    }
    for block in range(3)
    for what in ("heads", "ffn")
]
LATENCY = {
    "engine": "openvino",
    "precision": "int8",
    "batch": 8,
    "sequence": 32,
    "rest_ms": 0.25,
    "block_ms": 0.5,
    "heads": {"counts": [1, 4], "ms": [0.0, 0.75]},
    "ffn": {"counts": [32, 128, 256], "ms": [0.0, 0.5, 1.25]},
    "asked_ms": 2.0,
    "before": {"predicted_ms": 6.6, "measured_ms": 6.0},
    "rounds": [
        {"predicted_ms": 2.0, "measured_ms": 2.5, "speedup": 2.4},
        {"predicted_ms": 1.6, "measured_ms": 1.98, "speedup": 3.03},
    ],
    "after": {"predicted_ms": 1.6, "measured_ms": 1.98, "speedup": 3.03},
}


def figures(**changes: Any) -> dict[str, Any]:
    return {
        "method": "joint",
        "measure": "latency",
        "sparsity": 0.617,
        "cost": {"before": 6.35, "after": 1.35},
        "before": SIZES,
        "after": {**SIZES, "hidden": 32, "heads": (2, 3), "key_value_heads": (2, 3), "ffn": (64, 128), "experts": (0, 0)},
        "layers": [0, 2],
        "steps": [
            {
                "share": 0.5,
                "learned": {
                    "losses": [{"epoch": 1, "teacher": 0.5, "sparsity": 0.1, "loss": 0.6}],
                    "selection": [],
                    "steps": 12,
                    "sparsity": 0.61,
                },
                "losses": [{"epoch": 1, "teacher": 0.4, "loss": 0.4}, {"epoch": 2, "teacher": 0.25, "loss": 0.25}],
                "selection": [{"step": 5, "value": 0.91}, {"step": 10, "value": 0.9}],
                "best_step": 5,
                "steps": 10,
            }
        ],
        "sensitivity": {"measure": "kl", "rows": 128, "metric": "accuracy", "whole": 0.95, "layers": SCAN},
        "latency": LATENCY,
        **changes,
    }


def view(**changes: Any) -> dict[str, Any]:
    (found,) = pruning(contents({"variants": [{"id": "baseline"}, {"id": "prune", "pruning": figures(**changes)}]}))
    return found


def test_what_is_left_stands_beside_what_there_was() -> None:
    blocks = view()["blocks"]
    assert [block["gone"] for block in blocks] == [False, True, False]
    shown = {(block["number"], part["what"]): (part["after"], part["before"]) for block in blocks for part in block["parts"]}
    assert shown[0, "heads"] == (2, 4)
    assert shown[2, "heads"] == (3, 4)
    assert shown[2, "neurons"] == (128, 128)
    assert shown[1, "neurons"] == (0, 256)
    widths = {(block["number"], part["what"]): (part["width"], part["whole"]) for block in blocks for part in block["parts"]}
    assert widths[0, "neurons"] == (25.0, 100.0)
    assert widths[2, "neurons"] == (50.0, 50.0)
    assert view()["whole"] == ["32 of 64 channels of the residual stream"]


def test_iterations_tell_of_masks_and_of_recovery() -> None:
    masks, recovery = view()["steps"]
    assert (masks["name"], masks["steps"], masks["losses"], masks["selection"]) == ("1, masks", 12, ["0.6"], "")
    assert masks["share"] == "39.0 %"  # by the gates alone
    assert (recovery["name"], recovery["losses"], recovery["selection"]) == ("1, recovery", ["0.4", "0.25"], "0.9100")
    assert "teacher 0.25" in recovery["parts"]
    plain = view(steps=[{"share": 0.5}])["steps"]
    assert [(row["name"], row["steps"]) for row in plain] == [("1, recovery", "none")]


def test_predicted_and_measured_stand_side_by_side() -> None:
    told = view()["latency"]
    assert told["target"] == "2.00"
    rows = {row["name"]: row for row in told["rows"]}
    assert (rows["before"]["error"], rows["before"]["against_target"]) == ("+10.0 %", "")
    assert (rows["after, round 1"]["measured"], rows["after, round 1"]["against_target"], rows["after, round 1"]["kept"]) == (
        "2.50",
        "+25.0 %",
        False,
    )
    assert rows["after, round 2"]["kept"]
    assert rows["after, round 2"]["error"] == "\u221219.2 %"
    assert rows["after, round 2"]["speedup"] == "3.03\u00d7"
    assert len(told["charts"]) == 2
    assert view(latency=None)["latency"] is None


def test_embeddings_in_low_rank_are_a_line() -> None:
    made = {"rank": 96, "relative_error": 0.3126, "parameters": {"before": 11720448, "after": 2966976}}
    assert view(embeddings=made)["whole"][-1] == "embeddings of rank 96, 2,966,976 of 11,720,448 parameters, relative error 31.3 %"
    assert not any("rank" in line for line in view()["whole"])


def test_a_line_for_every_block() -> None:
    heads, neurons = view()["scans"]
    assert [line.label for line in heads.lines] == ["0", "1", "2"]
    assert neurons.name == "neurons"
    assert len(heads.lines[0].points) == 4
    assert heads.lines[2].points[-1][1] < heads.lines[0].points[-1][1]
    metrics, _ = view()["metrics"]
    assert [len(line.points) for line in metrics.lines] == [4, 4, 4]
    assert metrics.lines[0].points[0][1] == metrics.lines[2].points[0][1] < metrics.lines[0].points[-1][1] < metrics.lines[2].points[-1][1]


@pytest.mark.parametrize("left_out", ["sensitivity", "latency", "steps", "cost", "layers"])
def test_the_page_holds_it_whatever_is_missing(left_out: str) -> None:
    told = {key: value for key, value in figures().items() if key != left_out}
    if left_out == "layers":
        told["after"] = SIZES
    page = render({"variants": [{"id": "baseline"}, {"id": "pruned one", "pruning": told}]})
    assert '<section id="pruning">' in page
    assert "pruned one" in page
    for words in ("KL of the logits, nats", "on 128 rows"):
        assert (words in page) == (left_out != "sensitivity")
    assert ("accuracy on the same rows" in page) == (left_out != "sensitivity")
    assert ("target: 2.00 ms" in page) == (left_out != "latency")
    assert ("removed</span></td>" in page) == (left_out != "layers")


def test_a_run_without_pruning_has_no_section() -> None:
    assert 'id="pruning"' not in render({"variants": [{"id": "baseline", "pruning": None}]})
