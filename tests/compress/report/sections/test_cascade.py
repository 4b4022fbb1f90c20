"""The certificate on the page: the promise, its tiers, and what a goal says of it."""

from pathlib import Path
from typing import Any

import pytest

from compress.report.sections.cascade import cascade, percent, promise
from foundation.artifacts.cascade import Cascade
from foundation.standalone.confidence import KEEP_ALL
from tests.compress.report.test_page import make_report
from tests.html_tree import tree
from tests.plain_reports import contents, judge, render, summary

FOLDER = Path("runs/x")


def made(**more: Any) -> dict[str, Any]:
    """Returns a cascade of three tiers, as cascade.json holds it."""
    names = {"float_precision": "fp32", "engine": "openvino", "mode": "static"}
    score = {"name": "margin", "form": "class"}
    thresholds: list[tuple[Any, Any]] = [(None, None), (4.0, None), (3.25, 2.0), (KEEP_ALL, KEEP_ALL)]
    escalated = [(1000, 1000), (700, 700), (300, 100), (0, 0)]
    points = [
        {"thresholds": list(one), "disagreements": errors, "p_value": 0.01, "passed": errors < 5, "escalated": list(beyond)}
        for one, errors, beyond in zip(thresholds, (0, 1, 4, 30), escalated, strict=True)
    ]
    times = {"mean_ms": 2.0, "p50_ms": 1.5, "p90_ms": 4.0, "p99_ms": 9.0}
    document = {
        "schema": 1,
        "task": "text-classification",
        "original": {"variant": "baseline", "digest": "d"},
        "tiers": [
            {"number": 1, "variant": "small", "precision": "int8", **names, "score": score, "threshold": 3.25, "disagreements_alone": 30},
            {"number": 2, "variant": "quantize", "precision": "int8", **names, "score": score, "threshold": 2.0, "disagreements_alone": 12},
            {"number": 3, "variant": "baseline", "precision": "fp32", **names, "score": None, "threshold": None, "disagreements_alone": 0},
        ],
        "certificate": {
            "bound": 0.01,
            "confidence": 0.95,
            "n": 1000,
            "disagreements": 4,
            "rows_shared": 5,
            "path": {"points": points, "chosen": 2},
        },
        "escalation": [
            {"tier": 1, "units": 300, "n": 1000, "rate": 0.3, "upper": 0.35, "confidence": 0.95},
            {"tier": 2, "units": 100, "n": 1000, "rate": 0.1, "upper": 0.14, "confidence": 0.95},
        ],
        "times": {"batch": 1, "rows": 872, "cascade": times, "tiers": [times, times, {**times, "mean_ms": 12.0}]},
        "rows_per_tier": [700, 200, 100],
    }
    return document | more


@pytest.mark.parametrize(("share", "text"), [(0.005, "0.5"), (0.01, "1"), (0.95, "95"), (0.999, "99.9"), (0.0123456, "1.235")])
def test_shares_have_the_digits_that_they_need(share: float, text: str) -> None:
    assert percent(share).replace("\u00a0", " ") == f"{text} %"


def test_the_promise_has_bound_confidence_and_counts() -> None:
    text = promise(Cascade.model_validate(made())).replace("\u00a0", " ")
    for part in ("confidence 95 %", "at most 1 %", "baseline in torch", "4 of 1,000"):
        assert part in text


def test_each_tier_has_its_share_threshold_and_times() -> None:
    view = cascade(contents({"cascade": made()}))
    assert view is not None
    first, second, last = view["tiers"]
    assert [row["threshold"] for row in view["tiers"]] == ["3.25", "2", "answers all others"]
    assert [row["share"].replace("\u00a0", " ") for row in view["tiers"]] == ["70.0 %", "20.0 %", "10.0 %"]
    assert "35.0" in first["beyond"]
    assert "14.0" in second["beyond"]
    assert last["beyond"] is None
    assert last["times"][0] == "12.0"
    assert view["times"][0] == "2.00"
    assert "5 rows" in view["left_out"]
    assert view["drop"] is None


def test_thresholds_at_their_ends_are_said_in_words() -> None:
    ends = made()
    ends["tiers"][0]["threshold"], ends["tiers"][1]["threshold"] = None, KEEP_ALL
    view = cascade(contents({"cascade": ends}))
    assert view is not None
    assert [row["threshold"] for row in view["tiers"]][:2] == ["keeps no row", "keeps all rows"]


def test_the_curve_goes_through_the_points_of_the_path() -> None:
    view = cascade(contents({"cascade": made()}))
    assert view is not None
    (line,) = view["curve"].lines
    assert len(line.points) == 4
    assert "4 of 1000" in line.title
    assert "90.0 %" in line.title


def test_a_second_bound_is_a_sentence_of_its_own() -> None:
    second = made()
    second["certificate"]["max_drop"] = {"limit": 0.005, "drop": 0.002, "p_value": 0.03}
    view = cascade(contents({"cascade": second}))
    assert view is not None
    assert "0.5 points" in view["drop"]
    assert "0.20" in view["drop"]


def test_the_page_says_what_the_certificate_does_not_cover() -> None:
    page = tree(render({**make_report(), "cascade": made()}))
    (section,) = page.all("section", id="cascade")
    for part in ("another distribution", "risk against coverage", "872 evaluation rows"):
        assert part in section.text.replace("\u00a0", " ").lower()
    assert not list(tree(render(make_report())).all("section", id="cascade"))


@pytest.mark.whole
def test_the_headline_is_the_cascade_where_it_is_served() -> None:
    report = {**make_report(), "cascade": made()}
    served = {**report, "triton": {**report.get("triton", {}), "cascade": {"model": "cascade"}}}
    for parts in ("small, then quantize, then baseline", "at most 1 %", "confidence 95 %", "2.00 ms", "12.0 ms"):
        assert parts in next(iter(tree(render(served)).all("h1"))).text.replace("\u00a0", " ")
        assert parts in summary(served, FOLDER)[0]
    assert not [line for line in summary(served, FOLDER)[1:] if line.startswith("served")]
    for other in (report, {**served, "cascade": None}):
        assert "A cascade" not in next(iter(tree(render(other)).all("h1"))).text


@pytest.mark.parametrize(("limit", "met"), [(0.02, True), (0.01, True), (0.005, False)])
def test_a_goal_is_met_by_the_certified_bound(limit: float, met: bool) -> None:
    (goal,) = judge({"max_disagreement": limit}, {"cascade": made()})
    assert (goal["value"], goal["met"]) == (0.01, met)
    assert "0.95" in goal["at"]


def test_without_a_certificate_a_goal_is_not_judged() -> None:
    (goal,) = judge({"max_disagreement": 0.01}, {})
    assert goal.get("met") is None
    assert "cascade" in goal["reason"]
