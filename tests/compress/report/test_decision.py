"""One story: the summary, the headline, the goals, the sizes, the chart, the ledger and the choice of one report say the same."""

import re
from pathlib import Path
from typing import Any

import pytest

from compress.report import goals, phrases
from compress.report.decision import Decision
from compress.report.decision import decision_of as of_contents
from compress.report.page import SERVED
from compress.report.sections import accuracy
from compress.report.sections.choice import choice
from compress.report.summary import plain_text
from foundation.measure.metrics import METRICS
from tests.compress.report.test_goals import row
from tests.plain_reports import contents, decision_of, render, settled, summary

NAMES = ("variant", "precision", "float_precision", "engine", "mode")
INT8, FLOAT = ("quantize", "int8", "bf16", "openvino", "dynamic"), ("baseline", "bf16", "bf16", "onnxruntime", "static")
SHAPES = ((1, 32), (8, 128))


def cells(value: float, *backends: str) -> dict[str, Any]:
    return {name: {"value": value - 0.001 * number, "n": 500} for number, name in enumerate(backends)}


def timings(variant: str, served: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of a recommended configuration, and of others in the same engine and precision: what is served may be any."""
    rows = [row("torch", "fp32", 9.0 * batch, batch, length, float_precision="fp32") for batch, length in SHAPES if variant == "baseline"]
    precision, half = ("int8", "bf16") if variant == "quantize" else ("bf16", "bf16")
    for engine in ("openvino", "onnxruntime"):
        for number, (mode, rest) in enumerate((("static", "fp32"), ("static", half), ("dynamic", half))):
            names, found = (variant, precision, rest, engine, mode), {"mode": mode, "float_precision": rest}
            time = 1.0 if names == served else 2.0 + number
            rows += [row(engine, precision, time * batch, batch, length, **found) for batch, length in SHAPES]
    return rows


def finished(task: str, metric: str, before: float, after: float, served: tuple[str, ...], limits: dict[str, Any], hops: int = 2) -> Any:
    """A report.json as `collect` writes it, apart from what no part of the story reads."""
    engine, other = served[3], {"f1": 0.8771, "matthews": 0.81, "pearson": 0.9, "entity_f1": 0.88}
    own = cells(after, *(engine, "triton")[:hops])
    variants = [
        {
            "id": name,
            "stages": ["baseline", *([name] if name != "baseline" else [])],
            "engine": "openvino",
            "size_bytes": size,
            "accuracy": {**cells(value, "torch"), "openvino": {"value": value - 0.05, "n": 500}},  # of the recommended mode
            "metrics": {"torch": {metric: value, **{key: figure for key, figure in other.items() if key != metric}}},
            "drops": {},
            "latency": timings(name, served),
            **({"precision": "int8"} if name == "quantize" else {"precision": "fp32"}),
        }
        for name, value, size in (("baseline", before, 91_300_000), ("quantize", after + 0.01, 59_600_000))
    ]
    figures = {"metric": after, "size_bytes": 35_800_000, "time_ms": 1.0, "missed": []}
    competes = metric != "perplexity"
    rivals = [{**dict(zip(NAMES, key, strict=True)), **figures} for key in (served, INT8 if served is FLOAT else FLOAT)]
    report: dict[str, Any] = {
        "schema": 1,
        "name": "x",
        "task": task,
        "metric": {"name": metric, "higher_is_better": metric != "perplexity"},
        "baseline": "baseline",
        "target": {"engines": ["openvino", "onnxruntime"]},
        "variants": variants,
        "served": {
            **dict(zip(NAMES, served, strict=True)),
            "size_bytes": 35_800_000,
            "accuracy": own,
            "drops": {
                name: {"difference": METRICS[metric].drop(before, cell["value"]), "low": -0.01, "high": 0.05} for name, cell in own.items()
            },
            "metrics": {name: {metric: after, **({"f1": 0.8516} if metric == "accuracy" else {})} for name in own},
            "reason": None if competes else "target.serve: first",
            "ranking": rivals if competes else [],
        },
    }
    return settled(report, limits)


STORIES = {
    "classification": ("text-classification", "accuracy", 0.9, 0.897, INT8, {"max_drop": 0.01, "max_size_mb": 20}),
    "embeddings, float wins": ("sentence-embedding", "spearman", 0.85, 0.8496, FLOAT, {"max_drop": 0.01}),
    "entities, another metric": ("token-classification", "entity_recall", 0.91, 0.87, INT8, {"max_drop": 0.01, "int8_faster": True}),
    "generation, nothing competes": ("text-generation", "perplexity", 20.0, 20.5, INT8, {"max_drop": 0.05}, 1),
    "questions, no server": ("question-answering", "answer_f1", 0.88, 0.86, INT8, {}, 1),
    "goals missed later": ("text-classification", "accuracy", 0.9, 0.8905, INT8, {"max_drop": 0.01}),  # in Triton 0.8895
}


@pytest.fixture(params=STORIES, name="report")
def _report(request: pytest.FixtureRequest) -> dict[str, Any]:
    return finished(*STORIES[request.param])


def test_every_place_states_the_same_loss(report: dict[str, Any]) -> None:
    decision, metric = decision_of(report), report["metric"]["name"]
    assert decision.hop == list(report["served"]["accuracy"])[-1]
    before, after, change = (
        *(phrases.figure(cell.value, metric) for cell in (decision.before, decision.after)),
        phrases.change(decision.cost.value, metric),
    )
    lines = summary(report, Path("x"))
    assert all(plain_text(str(text)) in lines[0] for text in (before, after, change))
    page, sentence = render(report), "".join(text for text, _ in phrases.verdict(decision))
    assert metric.lower() in sentence.lower()
    amount = str(change).lstrip("+\u2212").split("\u00a0")[0]
    assert amount in sentence
    assert sentence in re.sub("<[^>]+>", "", page).replace("&gt;", ">")
    row_of_ledger = accuracy.ledger(contents(report), decision)["rows"][-1]
    known = {cell["value"]: cell for cell in row_of_ledger["cells"] if cell["known"]}
    assert row_of_ledger["id"] == SERVED
    assert known[after]["change"] == change
    assert [goal["value"] for goal in report["goals"] if goal["goal"] == "max_drop"] in ([decision.cost.value], [])
    assert page.count(after) >= 2


def test_every_place_states_the_same_size(report: dict[str, Any]) -> None:
    decision = decision_of(report)
    size = phrases.size(decision.size_bytes)
    assert decision.size_bytes == 35_800_000
    page = render(report)
    [line] = [line for line in summary(report, Path("x")) if line.startswith("size")]
    assert plain_text(size) in line
    assert phrases.size(decision.baseline_bytes).replace("\u00a0", " ") in line
    under_size = page[page.index('<section id="size">') :]
    first = under_size[under_size.index("<tbody>") :]
    assert size in first[: first.index("</tr>")]
    assert decision.served is not None
    assert phrases.configuration(decision.served) in first[: first.index("</tr>")]
    chosen = choice(decision)
    assert chosen is not None
    assert [row["size"] for row in chosen["rows"][:1]] in ([size], [])
    assert [goal["value"] for goal in report["goals"] if goal["goal"] == "max_size_mb"] in ([35.8], [])


def test_the_chart_and_the_tables_mark_what_is_served_at_every_shape(report: dict[str, Any]) -> None:
    whole = contents(report)
    decision = of_contents(whole)
    assert decision.served is not None
    plots = accuracy.plots(whole, decision)
    assert len(plots) == len(SHAPES)
    for plot, (batch, _) in zip(plots, SHAPES, strict=True):
        for view in ("wide", "narrow"):
            [mark] = [mark for mark in plot[view].marks if mark.point.role == "served"]
            assert (mark.point.x, mark.point.y) == (1.0 * batch, decision.accuracy[str(decision.engine)].value)
            assert mark.label is not None
    for table in accuracy.latency(whole, decision):
        [row_of_table] = [row for row in table["rows"] if row["is_served"]]
        assert row_of_table["mode"].startswith(decision.served.mode)


@pytest.mark.parametrize(("others", "only"), [((), False), (("min_speedup",), True)])
def test_one_configuration_that_meets_the_goals_is_called_the_only_one(others: tuple[str, ...], only: bool) -> None:
    ranking = [{"time_ms": 1.0}, {"time_ms": 2.0, "missed": others}]
    found = decision_of({"served": {"ranking": ranking}, "goals": [{"goal": "min_speedup", "met": True}]}).reason or ""
    assert ("the only one of 2" in found) == only
    assert ("fastest of 2" in found) != only


def test_the_reason_agrees_with_the_goals(report: dict[str, Any]) -> None:
    decision = decision_of(report)
    missed = [str(goal["goal"]) for goal in report["goals"] if goal["met"] is False]
    assert list(decision.missed) == missed == goals.missed(contents(report))
    assert decision.reason == report["served"]["reason"]
    assert decision.reason is not None
    if decision.ranking:
        assert ("all meet the goals" in decision.reason) == (bool(report["goals"]) and not missed)
        assert all(name in decision.reason for name in missed)
    page = render(report)
    assert phrases.goals_sentence(list(decision.goals)) in page
    assert decision.reason in page
    [line] = [line for line in summary(report, Path("x")) if line.startswith("served")]
    assert decision.reason in line


def test_a_metric_that_moves_far_more_than_the_judged_one_is_named_beside_it() -> None:
    decision = decision_of(finished(*STORIES["classification"]))
    assert decision.cost.value == pytest.approx(0.004)
    assert decision.worst_other is not None
    assert (decision.worst_other.metric, decision.worst_other.lost) == ("f1", pytest.approx(0.8771 - 0.8516))
    for text in ("".join(part for part, _ in phrases.verdict(decision)), summary(finished(*STORIES["classification"]), Path("x"))[1]):
        assert all(figure in text.replace("\u00a0", " ") for figure in ("87.71 %", "85.16 %"))
    assert decision_of(finished(*STORIES["entities, another metric"])).worst_other is None


@pytest.mark.parametrize("report", [{}, {"variants": []}, {"served": None}, {"variants": [{"id": "x"}], "baseline": "x"}])
def test_a_report_that_says_little_has_a_decision_too(report: dict[str, Any]) -> None:
    found = decision_of(report)
    assert isinstance(found, Decision)
    assert (found.served, found.cost.value, found.size_bytes, found.reason, found.missed) == (None, None, None, None, ())


def test_the_page_forms_ratios_of_the_same_turns_as_the_report() -> None:
    """A turn without a usable sample is null in `turns_ms`; without it the page would divide times of different turns."""
    report = finished("text-classification", "f1", 0.8771, 0.8731, INT8, {})
    for variant in report["variants"]:
        for timed in variant["latency"]:
            time = timed["p50_ms"]
            lost = timed["engine"] == "torch"
            timed["turns_ms"] = [time, None, 3 * time, time] if lost else [time, 2 * time, 3 * time, time]
    speedup = decision_of(report).speedup
    assert speedup.low == pytest.approx(speedup.value) == pytest.approx(speedup.high)  # the machine was as slow for both in each turn


@pytest.mark.parametrize("busy", [False, True])
def test_the_headline_promises_no_speed_that_a_busy_machine_measured(busy: bool) -> None:
    report = finished("text-classification", "f1", 0.8771, 0.8731, INT8, {})
    for variant in report["variants"]:
        for timed in variant["latency"]:
            timed["busy"] = busy
    parts = phrases.verdict(decision_of(report))
    assert [strong for text, strong in parts if "faster" in text or "slower" in text] == [not busy]
    sentence = "".join(text for text, _ in parts)
    assert ("busy" in sentence) == busy != any(bound in sentence for bound in ("at least", "up to"))
