"""The metric that is judged: every metric of a task and figures of single classes, against scikit-learn, and where it counts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_score, recall_score

from compress.report import intervals, phrases
from foundation.core.errors import InputError
from foundation.core.goals import Goals
from foundation.labels.classes import ClassIds
from foundation.labels.tasks import TASKS
from foundation.measure.answers import save_predictions
from foundation.measure.chance import chance
from foundation.measure.fastest import Measured, fastest
from foundation.measure.judged import judged_of, known_metric, problem_with
from tests.plain_reports import judge

LABELS = ("good", "bad:worse", "odd")
TASK = "text-classification"
SCORES = {"recall": recall_score, "precision": precision_score, "f1": f1_score}


def logits_of(classes: np.ndarray) -> np.ndarray:
    return np.eye(3, dtype=np.float32)[classes]


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("label", LABELS)
def test_figures_of_a_class_are_those_of_scikit_learn(kind: str, label: str) -> None:
    draw, number = np.random.default_rng(3), LABELS.index(label)
    true, answered = draw.integers(0, 3, 60), draw.integers(0, 3, 60)
    metric = judged_of(TASK, f"{kind}:{label}", LABELS).metric
    expected = SCORES[kind](true, answered, labels=[number], average=None)[0]
    assert metric.of(logits_of(answered), true) == pytest.approx(expected)
    sets, found = draw.random((40, 3)) < 0.4, draw.normal(size=(40, 3)).astype(np.float32)
    expected = SCORES[kind](sets[:, number], found[:, number] > 0)
    metric = judged_of("multi-label-classification", f"{kind}:{label}", LABELS).metric
    assert metric.of(found, sets) == pytest.approx(expected)


def test_every_metric_of_a_task_can_be_judged() -> None:
    for task, row in TASKS.items():
        assert judged_of(task, None, ()).name == row.metric
        for name in row.metrics:
            assert problem_with(task, name) is None
            assert replace(judged_of(task, name, ()).metric, of=max) == replace(known_metric(name), of=max)


@pytest.mark.parametrize(
    ("task", "asked", "words"),
    [
        (TASK, "f2", ["'f2' given", "matthews", "recall:LABEL"]),
        (TASK, "recall:god", ["'god' given", "good", "did you mean"]),
        (TASK, "recall:", ["'recall:' given"]),
        ("text-regression", "recall:good", ["'recall:good' given", "spearman"]),
        ("token-classification", "f1", ["'f1' given", "entity_recall"]),
    ],
)
def test_a_metric_that_a_task_lacks_is_one_line(task: str, asked: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        judged_of(task, asked, LABELS)
    [problem] = caught.value.lines
    assert problem.startswith("goals.metric: ")
    assert all(word in problem for word in words)


def test_a_class_is_held_against_answers_that_know_nothing() -> None:
    true = np.array([0] * 50 + [1] * 50)
    right = logits_of(true)
    assert chance(judged_of(TASK, "precision:good", LABELS).metric, right, ClassIds(true)) == pytest.approx(0.5, abs=0.15)
    assert chance(judged_of(TASK, "recall:good", LABELS).metric, right, ClassIds(true)) == pytest.approx(
        0.5, abs=0.15
    )  # shuffled, not always good


def test_drop_interval_and_verdict_are_those_of_the_class() -> None:
    true = np.array([0] * 40 + [1] * 160)
    worse = true.copy()
    worse[:8] = 1  # a fifth of the class, 4 % of the rows
    judged = judged_of(TASK, "recall:good", LABELS)
    found = intervals.paired(judged.metric, logits_of(true), logits_of(worse), ClassIds(true))
    assert found.difference == pytest.approx(0.2)
    assert 0.05 < found.low < 0.2 < found.high < 0.4
    report: dict[str, Any] = {
        "metric": {"name": judged.name, "higher_is_better": True, "chance": 0.2},
        "baseline": "a",
        "variants": [
            {"id": "a", "accuracy": {"torch": {"value": 1.0, "n": 200}}},
            {"id": "b", "accuracy": {"torch": {"value": 0.8, "n": 200}}, "drops": {"torch": found.written()}},
        ],
    }
    [goal] = judge({"max_drop": 0.1}, report)
    assert (goal["value"], goal["met"], goal["low"]) == (pytest.approx(0.2), False, found.low)
    assert phrases.figure(0.8, judged.name) == "80.00\u00a0%"
    assert phrases.headline(judged.name) == "Recall:good"
    assert phrases.headline("entity_f1") == "Entity F1"


def test_what_is_served_is_chosen_by_the_judged_metric(tmp_path: Path) -> None:
    true = np.array([0] * 10 + [1] * 90)
    blind, fair = np.ones(100, int), np.where(np.arange(100) % 10 == 5, 1 - true, true)
    entries = []
    for name, answered, time in (("static", blind, 1.0), ("dynamic", fair, 2.0)):
        save_predictions(tmp_path / f"{name}.safetensors", logits_of(answered), ClassIds(true))
        entry = {"engine": "openvino", "mode": name, "runnable": True, "size_bytes": 1, "predictions": f"{name}.safetensors"}
        entries.append({**entry, "metrics": {"accuracy": float((answered == true).mean())}, "time": time})
    build = {"variant": "a", "precision": "fp32", "float_precision": "fp32", "engines": entries}
    (tmp_path / "export.json").write_text(json.dumps({"builds": [build]}))
    rows = [
        {"variant": "a", "precision": "fp32", "float_precision": "fp32", "engine": "openvino", "mode": entry["mode"]}
        | {"batch": 1, "sequence": 8, "p50_ms": entry["time"], "throughput_per_s": 1.0}
        for entry in entries
    ]
    (tmp_path / "latency.json").write_text(json.dumps(rows))

    def first(asked: str | None) -> str:
        measured = Measured(tmp_path, tmp_path, ["a"], "a", 0.95)
        return fastest(measured, Goals(max_drop=0.1), judged_of(TASK, asked, LABELS))[0].candidate.key[4]

    assert first(None) == "static"  # accuracy 0.9
    assert first("recall:good") == "dynamic"  # recall 0 against 0.9
