"""The last lines of a run, and the report as typed values."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from compress.report.document import Report
from foundation.core.errors import InputError
from tests.compress.report.test_goals import make_report
from tests.plain_reports import findings, judge, summary

FOLDER = Path("runs/tiny")


def judged(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    report = make_report(**changes)
    made = {"goals": judge(config, report), "findings": findings(config, report)}
    return {**report, "schema": 1, "name": "tiny", "task": "text-classification", "warnings": ["w"], **made}


def test_the_three_figures_and_the_path() -> None:
    assert summary(judged({"max_drop": 0.01, "min_speedup": 8.0}), FOLDER) == [
        "accuracy    90.00 % in torch -> 89.30 % in Triton (n = 1000; change -0.70 pt, 95 % interval -1.50 to +0.10)",
        "speed       8.00x faster than torch fp32 at the worst shape (OpenVINO, batch 8 x 128 tokens)",
        "size        90.0 MB -> 24.0 MB deployed (3.75x smaller)",
        "goals       all 2 goals met",
        "report      runs/tiny/report.html",
    ]


def test_every_missed_goal_has_a_line_that_says_what_was_measured_where() -> None:
    lines = summary(judged({"max_drop": 0.001, "min_speedup": 9.0, "max_size_mb": 24.0}), FOLDER)
    assert lines[3:] == [
        "goals       2 of 3 goals missed, 1 met",
        "            missed: Accuracy drop of at most 0.10 points; measured -0.70 pt (Triton)",
        "            missed: Speed-up over torch of at least 9.00x; measured 8.00x (OpenVINO, batch 8 x 128 tokens)",
        "report      runs/tiny/report.html",
    ]


def test_int8_that_is_not_faster_is_a_finding() -> None:
    report = judged({})
    report["variants"][1]["latency"][1]["p50_ms"] = 80.0
    report["findings"] = findings({}, report)
    lines = summary(report, FOLDER)
    assert not any(line.startswith("goals") for line in lines)
    [finding] = [line for line in lines if line.startswith("finding")]
    assert all(words in finding for words in ("int8 faster", "0.50x", "b (20.0 % of MACs)"))


def test_what_was_not_measured_has_its_reason() -> None:
    report = judged({"min_speedup": 2.0, "int8_faster": False})
    report["variants"][-1] |= {"latency": [], "size_bytes": None}
    report["goals"] = judge({"min_speedup": 2.0, "int8_faster": False}, report)
    lines = summary(report, FOLDER)
    assert lines[1:3] == ["speed       not measured: openvino was not timed", "size        not measured: no files were built for openvino"]
    assert lines[4] == "            not judged: Speed-up over torch of at least 2.00x: openvino was not timed"


def test_slower_and_larger_are_called_so() -> None:
    report = judged({})
    report["variants"][-1]["size_bytes"] = 180_000_000
    for row in report["variants"][-1]["latency"]:
        row["p50_ms"] *= 16
    lines = summary(report, FOLDER)
    assert lines[1].startswith("speed       2.00x slower than torch fp32")
    assert lines[2].endswith("(2.00x larger)")


def test_perplexity_changes_by_percent() -> None:
    report = judged({}, metric={"name": "perplexity", "higher_is_better": False})
    assert summary(report, FOLDER)[0].startswith("perplexity  0.90 in torch -> 0.89 in Triton (n = 1000; change -0.78 %")


def test_figures_are_ascii_on_any_console() -> None:
    assert all(line.isascii() for line in summary(judged({"max_drop": 0.001, "min_speedup": 900.0}), FOLDER))
    assert all(line.isascii() for line in summary({}, FOLDER))


def written(folder: Path, report: dict[str, Any]) -> Path:
    for variant in report["variants"]:
        variant |= {"parameters": 10, "macs": 20, "checkpoint_bytes": 30, "precision": "int8", "int8_share": None}
        for row in variant["latency"]:
            row |= {"float_precision": "fp32", "threads": 2, "quantiles_ms": [1.0]}
    report["variants"][0]["accuracy"]["triton"] = {"value": None, "reason": "this variant is not in the model repository"}
    (folder / "report.json").write_text(json.dumps(report))
    return folder


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report.load(written(tmp_path, judged({"max_drop": 0.001, "min_speedup": 8.0})))


def test_a_report_has_typed_values(report: Report) -> None:
    assert (report.name, report.task, report.metric, report.higher_is_better) == ("tiny", "text-classification", "accuracy", True)
    assert list(report.variants) == ["baseline", "quantize"]
    assert (report.baseline.id, report.last.id, report.last.stages) == ("baseline", "quantize", ("baseline", "quantize"))
    cell = report.last.accuracy["triton"]
    assert (cell.variant, cell.backend, cell.value, cell.n, cell.low) == ("quantize", "triton", 0.893, 1000, None)
    assert report.baseline.accuracy["triton"].reason == "this variant is not in the model repository"
    assert report.speedup == 8.0
    assert report.drop == pytest.approx(0.007)
    assert [goal.goal for goal in report.missed] == ["max_drop"]
    assert [goal.met for goal in report.goals] == [False, True]
    assert (report.warnings, report.html) == (("w",), report.folder / "report.html")


def test_latency_rows_are_ready_for_a_table(report: Report) -> None:
    assert len(report.latency) == 10
    assert asdict(report.last.latency[0]) == {
        "variant": "quantize", "engine": "openvino", "mode": "static", "precision": "int8", "float_precision": "fp32", "device": "cpu",
        "threads": 2, "batch": 1, "sequence": 32, "p50_ms": 2.0, "p90_ms": 2.2, "p99_ms": 3.0, "throughput_per_s": 500.0, "n": 200,
    }  # fmt: skip


def test_a_report_prints_its_summary_and_every_hop(report: Report) -> None:
    lines = repr(report).splitlines()
    assert lines[0] == "tiny: text-classification"
    assert lines[1:6] == summary(report.data, report.folder)[:5]
    assert lines[-2].split() == ["quantize", "openvino", "89.40", "%", "1000"]
    assert any(line.startswith("baseline            triton        not measured  this variant is not in") for line in lines)
    assert repr(report).isascii()


def test_a_report_is_read_from_its_file_too(report: Report) -> None:
    assert Report.load(report.folder / "report.json").data == report.data
    assert Report.load(str(report.folder)).folder == report.folder


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no report"), ("{", "damaged"), ("[]", "schema None given"), ('{"schema": 2}', "schema 2 given; 1 is allowed")],
)
def test_what_is_no_report_is_one_line(content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(InputError, match=words):
        Report.load(tmp_path)
