"""What the report prints of a quantized mixture: the load of its experts, and the tokens that they had no room for."""

from __future__ import annotations

from typing import Any

import pytest

from compress.report.evaluations import dropped_choices
from compress.report.sections.quantize import quantization
from tests.plain_reports import contents, render

FIGURES = {"experts": {"block.1.experts": [30, 10, 0, 0], "block.3.experts": [0, 0, 0, 0]}, "dropped_tokens": {"block.1.experts": 1200}}


def test_the_load_of_each_expert_is_told() -> None:
    (view,) = quantization(contents({"variants": [{"id": "baseline"}, {"id": "quantize", "quantization": FIGURES}]}))
    loaded, idle = view["loads"]
    assert (loaded["name"], loaded["busiest"], loaded["dropped"]) == ("block.1.experts", "3.00", "1,200")
    assert loaded["bars"][1] == {"height": 33.3, "words": "expert 1: 25.0 %"}
    assert (idle["busiest"], idle["dropped"]) == ("0.00", None)


def test_models_without_experts_have_no_loads() -> None:
    (view,) = quantization(contents({"variants": [{"id": "quantize", "quantization": {"calibrator": "minmax"}}]}))
    assert view["loads"] == []


def test_the_page_has_bars_and_dropped_tokens() -> None:
    page = render({"variants": [{"id": "quantize", "quantization": FIGURES}]})
    assert 'title="expert 1: 25.0 %"' in page
    assert "1,200" in page
    assert "Tokens without room" in page


def test_what_a_capacity_dropped_in_training_is_told_with_the_stages() -> None:
    stages = [{"id": "finetune", "seconds": 2.0, "dropped_expert_choices": 0.0312}, {"id": "distill", "seconds": 1.0}]
    page = render({"stages": stages})
    assert "Choices of experts dropped in training (<code>parallel.expert_capacity</code>): finetune 3.12 %." in page
    assert "Choices of experts dropped" not in render({"stages": stages[1:]})


@pytest.mark.parametrize(("figures", "share"), [
    ({"steps": 10, "dropped_expert_choices": 0.1}, 0.1),
    ({"steps": [{"share": 0.5}, {"dropped_expert_choices": 0.2}, {"dropped_expert_choices": 0.1}]}, 0.2),
    ({"recovery": {"dropped_expert_choices": 0.3}, "learning": {"steps": 2}}, 0.3),
    ({"learning": {"dropped_expert_choices": 0.0}}, 0.0),
    ({"steps": 10}, None),
])  # fmt: skip
def test_the_share_is_the_largest_of_the_trainings_of_a_stage(figures: dict[str, Any], share: float | None) -> None:
    assert dropped_choices(figures) == share
