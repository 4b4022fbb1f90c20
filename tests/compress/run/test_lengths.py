"""Shapes that goals limit are measured, or refused in one line before anything is loaded."""

from typing import Any

import numpy as np
import pytest

from compress.recipe import Recipe, check
from compress.run.implicit import shapes
from compress.run.lengths import in_samples
from compress.run.prepare import prepare, questionable_goals
from foundation.core.errors import InputError
from foundation.core.goals import Goals
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.measure.judged import num_predictions
from tests.tiny_recipes import tiny_vit

TEXT: dict[str, Any] = {"name": "x", "model": {"path": "p", "task": "text-classification"}, "data": {"path": "p", "max_length": 64}}


def recipe(base: dict[str, Any], limits: list[dict[str, Any]], **target: Any) -> Recipe:
    goals = {"max_latency_ms": [{"value": 2.0, **limit} for limit in limits]}
    return check({**base, "goals": goals, "target": {"batch_sizes": [1], **target}, "stages": [{"finetune": {}}, {"export": {}}]})


def test_shapes_that_goals_limit_join_those_of_the_target() -> None:
    made = in_samples(recipe(TEXT, [{"sequence": 48}, {"batch": 3, "sequence": 64}], sequence_lengths=[32]))
    timed = shapes("text-classification", made.target)
    assert {(1, 32), (1, 48), (3, 64)} <= set(timed)
    assert in_samples(made) == made
    images = in_samples(recipe(tiny_vit("x"), [{"batch": 5}])).target
    assert shapes("image-classification", images) == [(1, None), (5, None)]


def test_a_target_that_has_them_stays_as_it_is() -> None:
    given = recipe(TEXT, [{"sequence": 32}], sequence_lengths=[32])
    assert in_samples(given) is given


@pytest.mark.parametrize(
    ("base", "limit", "words"),
    [
        (TEXT, {"batch": 1}, ["sequence: missing", "such as 64"]),
        (TEXT, {"sequence": 65}, ["65 given", "at most 64", "data.max_length"]),
        (tiny_vit("x"), {"sequence": 32}, ["32 given", "leave it out"]),
        (tiny_vit("x"), {"at": "server"}, ["server given", "triton_repo"]),
    ],
)
def test_shapes_that_cannot_be_measured_are_refused_before_the_data_are_read(
    base: dict[str, Any], limit: dict[str, Any], words: list[str], tmp_path: Any
) -> None:
    for refused in (in_samples, lambda given: prepare(given, tmp_path, ConsoleProgress("silent"))):
        with pytest.raises(InputError) as caught:
            refused(recipe(base, [{"sequence": 32} if base is TEXT else {}, limit]))
        [problem] = caught.value.lines
        assert problem.startswith("goals.max_latency_ms[1].")
        assert all(word in problem for word in words)


@pytest.mark.parametrize(("given", "asks"), [(0.01, False), (0.1, False), (0.5, True), (1, True)])
def test_a_drop_that_looks_like_points_is_questioned(given: float, asks: bool) -> None:
    questions = Goals(max_drop=given).questions()
    assert len(questions) == asks
    assert all("goals.max_drop" in line and f"{given / 100:g}" in line for line in questions)


@pytest.mark.parametrize(
    ("given", "predictions", "rows"), [(0.01, 12, "1000"), (0.01, 100, None), (0.01, 99, "1000"), (0, 12, None), (0.01, None, None)]
)
def test_a_drop_of_less_than_one_prediction_is_questioned(given: float, predictions: int | None, rows: str | None) -> None:
    questions = Goals(max_drop=given).questions(predictions)
    assert len(questions) == (rows is not None)
    assert all(f"one of {predictions} " in line and f"at least {rows} " in line for line in questions)


@pytest.mark.parametrize(
    ("metric", "expected"), [(None, 7), ("f1", 7), ("matthews", None), ("recall:a", 3), ("recall:b", 4), ("precision:a", 7)]
)
def test_predictions_are_counted_for_metrics_that_are_shares_of_them(metric: str | None, expected: int | None) -> None:
    labels = ClassIds(np.array([0, 1, 1, 0, 1, 0, 1]))
    assert num_predictions("text-classification", metric, labels, ("a", "b")) == expected


def test_a_drop_of_the_recall_of_a_class_names_the_class() -> None:
    [line] = Goals(max_drop=0.01, metric="recall:a").questions(3)
    assert "one of 3 evaluation predictions of the class a " in line
    assert "1000 rows of the class a" in line


@pytest.mark.parametrize("certified", [False, True])
def test_a_limit_on_other_answers_is_questioned_without_a_certificate(certified: bool) -> None:
    cascade = {"cascade": {"max_disagreement": 0.01}}
    given = {**TEXT, "goals": {"max_disagreement": 0.05}, "data": {**TEXT["data"], "certify": {"files": "rows.csv"}}}
    found = check({**given, "stages": [{"distill": {}}, {"export": {}}, *([cascade] if certified else [])]})
    split = Split(["a"] * 3, ClassIds(np.array([0, 1, 1])))
    lines = questionable_goals(found, Data(split, split, split, ("a", "b")))
    assert [line.partition(":")[0] for line in lines] == ([] if certified else ["goals.max_disagreement"])


@pytest.mark.parametrize("given", [1.5, 2, 50])
def test_a_drop_above_one_is_no_fraction(given: float) -> None:
    with pytest.raises(InputError) as caught:
        check({**TEXT, "goals": {"max_drop": given}, "stages": [{"quantize": {}}]})
    [problem] = caught.value.lines
    assert problem.startswith("goals.max_drop: ")
    assert f"give {given / 100:g}" in problem
