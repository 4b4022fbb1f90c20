"""Goals of single variants, as of the members of a family, beside what the same variant would get if it were served."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from compress.recipe import check
from compress.report import goals, phrases
from compress.report.variant_goals import judge_variants
from foundation.core.errors import InputError
from foundation.core.goals import Goals, VariantGoals
from tests.compress.report.test_goals import make_report, row
from tests.plain_reports import contents, judge


def member(name: str, accuracy: float, small_ms: float, large_ms: float) -> dict[str, Any]:
    """Returns a variant in int8."""
    return {
        "id": name,
        "stages": ["baseline", name],
        "size_bytes": 10_000_000,
        "accuracy": {"torch": {"value": accuracy, "n": 1000}, "openvino": {"value": accuracy - 0.001, "n": 1000}},
        "latency": [row("openvino", "int8", small_ms), row("openvino", "int8", large_ms, 8, 128), row("onnxruntime", "int8", 0.1)],
    }


def family() -> dict[str, Any]:
    """Returns a report whose last variant is the smallest of three, and served."""
    report = make_report()
    report["variants"] += [member("two", 0.89, 1.0, 13.0), member("five", 0.87, 0.5, 5.0)]
    report["served"] = {"variant": "five", "precision": "int8", "float_precision": "fp32", "engine": "openvino", "mode": "static"}
    return report


def judged(limits: dict[str, dict[str, Any]], report: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    checked = {name: VariantGoals.model_validate(one) for name, one in limits.items()}
    return [goal.written() for goal in judge_variants(checked, contents(report or family()))]


@pytest.mark.parametrize(("name", "place"), [("quantize", 1), ("two", 2), ("five", 3)])
def test_a_variant_gets_what_it_would_get_as_the_last_one(name: str, place: int) -> None:
    report, limits = family(), {"max_drop": 0.012, "min_speedup": 9.0, "max_size_mb": 20.0}
    alone = {**report, "served": None, "variants": report["variants"][: place + 1]}
    found = judged({name: limits})
    assert [goal.pop("variant") for goal in found] == [name] * 3
    assert found == [goal for goal in judge(limits, alone) if goal["goal"] in limits]


def test_a_speedup_over_another_variant_is_the_least_of_all_shapes() -> None:
    (goal,) = judged({"two": {"min_speedup": 1.9, "over": "quantize"}})
    assert goal["value"] == pytest.approx(min(2.0 / 1.0, 25.0 / 13.0))
    assert (goal["met"], goal["over"], goal["variant"], goal["limit"]) == (True, "quantize", "two", 1.9)
    (other,) = judged({"two": {"min_speedup": 1.95, "over": "quantize"}})
    assert other["met"] is False
    report = contents(family()).with_(
        goals=tuple(judge_variants({"two": VariantGoals(min_speedup=1.95, over="quantize")}, contents(family())))
    )
    assert goals.missed(report) == ["variants.two.min_speedup"]
    assert "two" in phrases.goal_name(report.goals[0], "accuracy")
    assert "quantize" in phrases.goal_name(report.goals[0], "accuracy")


def test_what_was_not_timed_is_not_judged() -> None:
    report = family()
    report["variants"][1]["latency"] = []
    (goal,) = judged({"two": {"min_speedup": 1.5, "over": "quantize"}}, report)
    assert (goal["met"], goal["value"]) == (None, None)
    assert "quantize was not timed" in goal["reason"]
    gone = judged({"nothing": {"max_drop": 0.1, "min_speedup": 1.5}})
    assert [goal["met"] for goal in gone] == [None, None]


def test_a_goal_that_is_not_set_is_not_judged() -> None:
    assert judged({"two": {}}) == []
    assert judge({"max_drop": 0.01}, family()) == judge({"max_drop": 0.01, "variants": {"two": {"max_drop": 0.1}}}, family())


def test_a_variant_that_no_stage_makes_is_said() -> None:
    recipe = {
        "name": "family",
        "model": {"path": "owner/model", "task": "text-classification"},
        "data": {"path": "owner/data"},
        "stages": [{"prune": {"family": [2, 3]}}, "quantize", "export"],
    }
    fine = {"quantize-2x": {"max_drop": 0.1, "min_speedup": 1.5, "over": "quantize-3x"}, "baseline": {}, "prune-3x": {}}
    assert check({**recipe, "goals": {"variants": fine}}).goals.variants == Goals(variants=fine).variants  # type: ignore[arg-type]
    wrong = {"quantize": {}, "prune-2x": {"min_speedup": 2, "over": "export"}}
    with pytest.raises(InputError) as caught:
        check({**recipe, "goals": {"variants": wrong}})
    assert [line.split(":")[0] for line in caught.value.lines] == ["goals.variants.quantize", "goals.variants.prune-2x.over"]
    with pytest.raises(ValidationError, match="over: a given without min_speedup"):
        VariantGoals(over="a")
