from typing import Any

import pytest

from compress.report import goals
from tests.plain_reports import contents, findings, judge


def row(engine: str, precision: str, p50: float, batch: int = 1, sequence: int | None = 32, **more: Any) -> dict[str, Any]:
    mode = "eager" if engine == "torch" else "static"
    fields = {"engine": engine, "mode": mode, "precision": precision, "device": "cpu", "batch": batch, "sequence": sequence, "p50_ms": p50}
    return fields | {"p90_ms": p50 * 1.1, "p99_ms": p50 * 1.5, "throughput_per_s": 1000 * batch / p50, "n": 200} | more


def make_report(**more: Any) -> dict[str, Any]:
    baseline = {
        "id": "baseline",
        "stages": ["baseline"],
        "size_bytes": 90_000_000,
        "accuracy": {"torch": {"value": 0.9, "n": 1000}},
        "latency": [
            row("torch", "fp32", 20.0),
            row("torch", "fp32", 200.0, 8, 128),
            row("torch", "bf16", 1.0),
            row("openvino", "fp32", 5.0),
            row("openvino", "fp32", 60.0, 8, 128),
            row("openvino", "bf16", 40.0, 8, 128),
        ],
    }
    last = {
        "id": "quantize",
        "stages": ["baseline", "quantize"],
        "size_bytes": 24_000_000,
        "accuracy": {"torch": {"value": 0.895, "n": 1000}, "openvino": {"value": 0.894, "n": 1000}, "triton": {"value": 0.893, "n": 1000}},
        "drops": {"triton": {"difference": 0.007, "low": -0.001, "high": 0.015}},
        "latency": [
            row("openvino", "int8", 2.0),
            row("openvino", "int8", 25.0, 8, 128),
            row("openvino", "int8", 0.1, mode="dynamic"),  # not the recommended mode
            row("onnxruntime", "int8", 0.5),
        ],
        "int8_layers": [
            {"name": "a", "macs": 70, "precision": "int8"},
            {"name": "b", "macs": 20, "precision": "fp32"},
            {"name": "c", "macs": 10, "precision": "fp32"},
        ],
    }
    metric = {"name": "accuracy", "higher_is_better": True}
    return {
        "variants": [baseline, last],
        "baseline": "baseline",
        "metric": metric,
        "target": {"engines": ["openvino", "onnxruntime"]},
    } | more


def judged(config: dict[str, Any], report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(goal for goal in [*judge(config, report), *findings(config, report)] if goal["goal"] == name)


def test_drop_is_the_baseline_in_torch_minus_triton() -> None:
    goal = judged({"max_drop": 0.01}, make_report(), "max_drop")
    assert goal["value"] == pytest.approx(0.007)
    assert (goal["met"], goal["limit"], goal["at"], goal["low"], goal["high"]) == (True, 0.01, "triton", -0.001, 0.015)


@pytest.mark.parametrize(("gone", "at", "value"), [(("triton",), "openvino", 0.006), (("triton", "openvino"), "torch", 0.005)])
def test_drop_is_taken_in_the_last_backend_that_ran(gone: tuple[str, ...], at: str, value: float) -> None:
    report = make_report()
    for backend in gone:
        report["variants"][1]["accuracy"][backend] = {"value": None, "reason": "did not run"}
    goal = judged({"max_drop": 0.01}, report, "max_drop")
    assert (goal["at"], goal["value"]) == (at, pytest.approx(value))


def test_a_drop_equal_to_its_limit_meets_it_despite_rounding() -> None:
    report = make_report()
    report["variants"][1]["accuracy"]["triton"]["value"] = 0.89
    assert 0.9 - 0.89 > 0.01
    assert judged({"max_drop": 0.01}, report, "max_drop")["met"] is True
    assert judged({"max_drop": 0.0099}, report, "max_drop")["met"] is False


def test_a_metric_where_lower_is_better_turns_the_sign() -> None:
    report = make_report(metric={"name": "loss", "higher_is_better": False})
    assert judged({"max_drop": 0.01}, report, "max_drop")["value"] == pytest.approx(-0.007)


def test_a_drop_of_perplexity_is_relative() -> None:
    report = make_report(metric={"name": "perplexity", "higher_is_better": False})
    report["variants"][0]["accuracy"]["torch"]["value"] = 20.0
    report["variants"][1]["accuracy"]["triton"]["value"] = 20.5
    goal = judged({"max_drop": 0.02}, report, "max_drop")
    assert (goal["value"], goal["met"], goal["low"]) == (pytest.approx(0.025), False, -0.001)
    assert judged({"max_drop": 0.025}, report, "max_drop")["met"] is True


def test_a_drop_on_different_rows_is_not_judged() -> None:
    report = make_report()
    report["variants"][1]["accuracy"]["triton"]["n"] = 64
    goal = judged({"max_drop": 0.01}, report, "max_drop")
    assert (goal["value"], goal["met"]) == (None, None)
    assert "1000 rows" in goal["reason"]
    assert "64" in goal["reason"]


def test_speedup_is_that_of_the_worst_shape_in_the_recommended_mode() -> None:
    goal = judged({"min_speedup": 8.0}, make_report(), "min_speedup")
    assert (goal["value"], goal["met"]) == (8.0, True)
    assert goal["at"] == "openvino, batch 8 x 128 tokens"
    assert judged({"min_speedup": 8.1}, make_report(), "min_speedup")["met"] is False


def test_speedup_needs_the_same_device_and_the_same_shapes() -> None:
    report = make_report()
    report["variants"][0]["latency"] = [row("torch", "fp32", 20.0)]
    goal = judged({"min_speedup": 8.0}, report, "min_speedup")
    assert (goal["value"], goal["met"]) == (None, None)
    assert "batch 8 x 128 tokens" in goal["reason"]
    report["variants"][0]["latency"] = [row("torch", "fp32", 20.0, device="cuda")]
    assert "on this device" in judged({"min_speedup": 8.0}, report, "min_speedup")["reason"]


def test_the_first_engine_is_judged_even_where_another_is_faster_and_says_why_it_was_not_timed() -> None:
    report = make_report(target={"engines": ["tensorrt", "openvino"]})
    report["variants"][1]["accuracy"]["tensorrt"] = {"value": None, "reason": "no GPU"}
    goal = judged({"min_speedup": 8.0}, report, "min_speedup")
    assert goal["value"] is None
    assert goal["reason"] == "tensorrt was not timed: no GPU"


@pytest.mark.parametrize(
    ("asked", "value", "met"),
    [
        ({"percentile": 50, "batch": 1, "sequence": 32, "value": 2.0}, 2.0, True),
        ({"percentile": 99, "batch": 8, "sequence": 128, "value": 30}, 37.5, False),
        ({"percentile": 50, "batch": 2, "sequence": 32, "value": 2.0}, None, None),
    ],
)
def test_latency_bounds(asked: dict[str, Any], value: float | None, met: bool | None) -> None:
    goal = judged({"max_latency_ms": [asked]}, make_report(), "max_latency_ms")
    assert (goal["value"], goal["met"]) == (value, met)


def test_a_limit_is_judged_in_the_engine_or_through_the_server_and_both_figures_stand_beside_it() -> None:
    names = {"variant": "quantize", "precision": "int8", "float_precision": "fp32", "engine": "openvino", "mode": "static"}
    report = served(**names)
    limits = [{"batch": 1, "sequence": 32, "p50_ms": 3.5, "p90_ms": 4.0, "p99_ms": None, "n": 150}]
    report["triton"] = {"models": [{**names, "limits": limits}, {**names, "mode": "dynamic", "limits": [{**limits[0], "p50_ms": 9.0}]}]}
    asked = {"percentile": 50, "batch": 1, "sequence": 32, "value": 3.0}
    for at, value, met in ((None, 2.0, True), ("engine", 2.0, True), ("server", 3.5, False)):
        goal = judged({"max_latency_ms": [{**asked, **({"at": at} if at else {})}]}, report, "max_latency_ms")
        assert (goal["value"], goal["met"], goal["judged_at"]) == (value, met, at or "engine")
        assert (goal["engine_ms"], goal["server_ms"]) == (2.0, 3.5)
    late = judged({"max_latency_ms": [{**asked, "at": "server", "percentile": 99}]}, report, "max_latency_ms")
    assert (late["met"], late["engine_ms"], late["server_ms"]) == (None, 3.0, None)
    assert "150 samples are too few" in late["reason"]
    elsewhere = judged({"max_latency_ms": [{**asked, "at": "server", "batch": 8, "sequence": 128}]}, report, "max_latency_ms")
    assert (elsewhere["met"], elsewhere["engine_ms"]) == (None, 25.0)
    assert "no server was timed" in elsewhere["reason"]


@pytest.mark.parametrize(("waited", "busy"), [(None, False), (0.3, False), (0.7, True)])
def test_a_limit_in_the_server_is_not_judged_where_its_threads_waited_for_a_core(waited: float | None, busy: bool) -> None:
    names = {"variant": "quantize", "precision": "int8", "float_precision": "fp32", "engine": "openvino", "mode": "static"}
    report = served(**names)
    limits = [{"batch": 1, "sequence": 32, "p50_ms": 3.5, "p90_ms": 4.0, "p99_ms": 500.0, "n": 250, "waited": waited}]
    report["triton"] = {"models": [{**names, "limits": limits}]}
    asked = {"percentile": 99, "batch": 1, "sequence": 32, "value": 20.0, "at": "server"}
    report["goals"] = judge({"max_latency_ms": [asked]}, report)
    [goal] = report["goals"]
    assert (goal["value"], goal["met"]) == (500.0, None if busy else False)
    assert ("waited for a core in 70 %" in goal.get("reason", "")) == busy
    assert goals.unjudged_busy(contents(report)) == (["max_latency_ms"] if busy else [])


def test_an_unmeasured_p99_says_how_many_samples_there_are() -> None:
    report = make_report()
    report["variants"][1]["latency"][0] |= {"p99_ms": None, "n": 31}
    asked = {"percentile": 99, "batch": 1, "sequence": 32, "value": 2.0}
    assert judged({"max_latency_ms": [asked]}, report, "max_latency_ms")["reason"] == "31 samples are too few for a p99"


def test_size_and_throughput() -> None:
    found = judge({"max_size_mb": 24, "min_throughput": 501}, make_report())
    assert [(goal["goal"], goal["value"], goal["met"]) for goal in found[:2]] == [
        ("max_size_mb", 24.0, True),
        ("min_throughput", 500.0, False),
    ]


def test_int8_is_compared_with_the_fastest_float_of_the_same_engine_at_the_largest_shape() -> None:
    goal = judged({}, make_report(), "int8_faster")
    assert (goal["value"], goal["met"], goal["limit"]) == (40.0 / 25.0, True, 1.0)
    assert "bf16" in goal["at"]


def test_int8_that_is_not_faster_names_the_layers_to_blame() -> None:
    report = make_report()
    report["variants"][1]["latency"][1]["p50_ms"] = 40.0
    goal = judged({}, report, "int8_faster")
    assert (goal["value"], goal["met"]) == (1.0, False)
    assert "b (20.0 % of MACs), c (10.0 % of MACs)" in goal["reason"]


def test_int8_has_to_beat_the_float_model_of_its_own_branch() -> None:
    report = make_report()
    other = {
        "id": "student",
        "stages": ["baseline", "student"],
        "latency": [row("openvino", "fp32", 1.0), row("openvino", "fp32", 9.0, 8, 128)],
    }
    report["variants"].insert(1, other)
    assert judged({}, report, "int8_faster")["value"] == 40.0 / 25.0
    report["variants"][-1]["stages"] = ["baseline", "student", "quantize"]
    assert judged({}, report, "int8_faster")["value"] == 9.0 / 25.0


def test_on_a_gpu_int8_has_to_beat_halves_and_torch_too() -> None:
    report = make_report(target={"engines": ["tensorrt"]})
    baseline, last = report["variants"]
    baseline["latency"] = [row("tensorrt", "fp32", 60.0, device="cuda"), row("tensorrt", "fp16", 30.0, device="cuda")]
    last["latency"] = [row("tensorrt", "int8", 25.0, device="cuda")]
    goal = judged({}, report, "int8_faster")
    assert (goal["value"], goal["met"]) == (30.0 / 25.0, True)
    assert goal["at"].endswith("against fp16")
    baseline["latency"].append({**row("torch", "bf16", 20.0, device="cuda"), "mode": "compiled"})
    goal = judged({}, report, "int8_faster")
    assert (goal["value"], goal["met"]) == (20.0 / 25.0, False)
    assert goal["at"].endswith("against bf16 in torch compiled")


def test_on_a_cpu_torch_is_no_rival() -> None:
    report = make_report()
    before = judged({}, report, "int8_faster")
    report["variants"][0]["latency"].append({**row("torch", "bf16", 0.1, 8, 128), "device": "cpu"})
    assert judged({}, report, "int8_faster") == before


def test_int8_that_is_not_faster_is_a_missed_goal_only_where_the_recipe_asks_for_it() -> None:
    report = make_report()
    report["variants"][1]["latency"][1]["p50_ms"] = 50.0
    for config in ({}, {"int8_faster": None}):
        assert judge(config, report) == []
        [found] = findings(config, report)
        assert (found["goal"], found["met"], found["value"]) == ("int8_faster", False, 40.0 / 50.0)
        assert "b (20.0 % of MACs)" in found["reason"]
    assert findings({"int8_faster": True}, report) == findings({"int8_faster": False}, report) == []
    assert [goal["met"] for goal in judge({"int8_faster": True}, report)] == [False]
    assert judge({"int8_faster": False}, report) == []
    report["variants"].pop()  # nothing was quantized
    assert findings({}, report) == judge({"int8_faster": True}, report) == []


@pytest.mark.parametrize(
    "report", [{}, {"variants": None}, {"variants": []}, {"variants": [{"id": "x", "latency": None, "accuracy": None}]}]
)
def test_nothing_measured_is_neither_met_nor_missed(report: dict[str, Any]) -> None:
    config = {"max_drop": 0.1, "min_speedup": 2, "max_size_mb": 1, "min_throughput": 1}
    found = judge(config | {"max_latency_ms": [{"percentile": 50, "batch": 1, "value": 1}]}, report)
    assert len(found) == 5
    assert all(goal["value"] is None and goal["met"] is None and goal["reason"] for goal in found)
    assert judge(None, report) == []


@pytest.mark.parametrize("precision", ["w8a16", "w4a16", "fp8"])
def test_int8_faster_is_not_asked_of_what_is_no_int8(precision: str) -> None:
    report = make_report()
    report["variants"][-1]["latency"] = [row("openvino", precision, 500.0, 8, 128)]
    assert findings({}, report) == []


def served(**names: Any) -> dict[str, Any]:
    """A report that says what is served."""
    report = make_report()
    for variant in report["variants"]:
        for cell in variant["latency"]:
            cell["float_precision"] = cell["precision"] if cell["precision"] != "int8" else "fp32"
    told = {"variant": "baseline", "precision": "bf16", "float_precision": "bf16", "engine": "openvino", "mode": "static"} | names
    told |= {
        "size_bytes": 45_000_000,
        "accuracy": {"openvino": {"value": 0.899, "n": 1000}},
        "drops": {"openvino": {"low": 0.0, "high": 0.002}},
    }
    return report | {"served": told}


def test_goals_are_judged_on_what_is_served() -> None:
    report = served()
    goal = judged({"max_drop": 0.01}, report, "max_drop")
    assert (goal["value"], goal["at"], goal["low"]) == (pytest.approx(0.001), "openvino", 0.0)
    assert judged({"max_size_mb": 50}, report, "max_size_mb")["value"] == 45
    asked = {"percentile": 50, "batch": 8, "sequence": 128, "value": 50.0}
    assert judged({"max_latency_ms": [asked]}, report, "max_latency_ms")["value"] == 40.0
    assert judged({"min_throughput": 1}, report, "min_throughput")["value"] == 200.0


def test_behind_the_server_the_drop_of_what_is_served_is_that_of_the_server() -> None:
    report = served()
    report["served"]["accuracy"]["triton"] = {"value": 0.88, "n": 1000}
    assert judged({"max_drop": 0.01}, report, "max_drop")["at"] == "triton"
    del report["served"]["accuracy"]["triton"]  # the Triton of the last variant is not that of what is served
    assert judged({"max_drop": 0.01}, report, "max_drop")["at"] == "openvino"


def test_a_mode_that_is_served_has_its_own_figures() -> None:
    names = {"variant": "quantize", "precision": "int8", "float_precision": "fp32", "engine": "openvino", "mode": "dynamic"}
    asked = {"percentile": 50, "batch": 1, "sequence": 32, "value": 1.0}
    assert judged({"max_latency_ms": [asked]}, served(**names), "max_latency_ms")["value"] == 0.1


def test_int8_is_judged_in_its_fastest_engine_whatever_is_served() -> None:
    report = served()
    report["variants"][1]["latency"].append(row("onnxruntime", "int8", 20.0, 8, 128))
    goal = judged({}, report, "int8_faster")
    assert (goal["value"], goal["at"]) == (40.0 / 20.0, "onnxruntime, batch 8 x 128 tokens, against bf16 in openvino")
    report["variants"][0]["latency"].append(row("onnxruntime", "fp32", 15.0, 8, 128))
    goal = judged({}, report, "int8_faster")
    assert (goal["value"], goal["met"]) == (15.0 / 20.0, False)


@pytest.mark.parametrize(("before", "floor", "met"), [(30.0, 2.0, False), (2.1, 2.0, None), (0.0, 0.0, None)])
def test_a_bleu_that_cannot_fall_is_not_judged(before: float, floor: float, met: bool | None) -> None:
    quality = {"bleu_before": before, "bleu": 0.0, "bleu_chance": floor, "bleu_change": None}
    report = make_report()
    report["variants"][-1]["answers"] = [{"engine": "openvino", "quality": quality}]
    found = judged({"max_bleu_drop": 0.5 if before != 2.1 else 3.0}, report, "max_bleu_drop")
    assert (found["met"], found["value"]) == (met, before)
    assert (met is None) == ("do not depend on their source" in found.get("reason", ""))


BUSY_GOALS = {
    "int8_faster": True,
    "min_speedup": 5.0,
    "max_latency_ms": [{"percentile": 50, "batch": 8, "sequence": 128, "value": 30}],
    "min_throughput": 10,
}


@pytest.mark.parametrize(
    ("variant", "engine", "unjudged"),
    [
        (1, "openvino", {"min_speedup", "max_latency_ms", "min_throughput", "int8_faster"}),
        (0, "torch", {"min_speedup"}),  # what is served was timed well
        (1, "onnxruntime", set()),  # nothing depends on it
    ],
)
def test_goals_on_a_spoiled_figure_are_not_judged(variant: int, engine: str, unjudged: set[str]) -> None:
    report = make_report()
    for latency in report["variants"][variant]["latency"]:
        if latency["engine"] == engine and latency["precision"] != "bf16":
            latency |= {"busy": True, "disturbed": 0.8}
    report["goals"] = judge(BUSY_GOALS, report)
    assert set(goals.unjudged_busy(contents(report))) == unjudged
    for goal in report["goals"]:
        assert (goal["met"] is None) == (goal["goal"] in unjudged)
        assert goal["value"] is not None, "the figure is shown all the same"
        assert ("machine busy" in goal.get("reason", "")) == (goal["goal"] in unjudged)


def test_a_ratio_within_turns_is_what_is_judged() -> None:
    report = make_report()
    report["variants"][0]["latency"][0]["turns_ms"] = [20.0, 60.0, 20.0]  # the reference at 1 x 32
    report["variants"][1]["latency"][0]["turns_ms"] = [2.5, 7.5, 2.5]
    goal = judged({"min_speedup": 9.0}, report, "min_speedup")
    assert (goal["value"], goal["low"], goal["met"]) == (pytest.approx(8), pytest.approx(8), False)
