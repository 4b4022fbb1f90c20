"""How close a quantized model is: the measure, the rows it is taken on, and the model that is left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.artifacts.artifact import Artifact
from foundation.core.resampling import Groups
from foundation.core.spread import spread
from foundation.core.target import Target
from foundation.data.splits import Split
from foundation.labels.classes import ClassIds
from foundation.measure.closeness import TRIAL_ROWS, bounds, closer, distance, interval
from foundation.measure.predictions import finely, predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward, linears
from foundation.schemes.int8 import Int8Linear, LayerScales, weight_scale
from foundation.stage.context import Context
from quantize.trial import Trial, in_int8

EMPTY = Split([], ClassIds(np.zeros(0, np.int64)))


@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 2**31))
def test_the_distance_of_classes_is_the_mean_divergence(rows: int, classes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    reference, logits = (50 * random.standard_normal((2, rows, classes))).astype(np.float32)
    p, q = (scipy.special.softmax(values.astype(np.float64), axis=1) for values in (reference, logits))
    expected = np.mean([scipy.special.rel_entr(a, b).sum() for a, b in zip(p, q, strict=True)])
    assert distance("text-classification", reference, logits) == pytest.approx(expected, rel=1e-6)
    assert distance("image-classification", reference, reference + 3) == pytest.approx(0, abs=1e-6)


def test_the_distance_of_values_is_the_mean_squared_error() -> None:
    reference, values = np.float32([[1.0], [2.0], [5.0]]), np.float32([[1.5], [2.0], [3.0]])
    assert distance("text-regression", reference, values) == pytest.approx((0.25 + 4) / 3)


@given(st.integers(2, 40), st.floats(-3, 3), st.floats(0.01, 5), st.integers(0, 2**31))
def test_the_interval_is_that_of_student(count: int, mean: float, spread_of: float, seed: int) -> None:
    values = mean + spread_of * np.random.default_rng(seed).standard_normal(count)
    expected = scipy.stats.t.interval(0.95, count - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    assert interval(values) == pytest.approx(expected)
    assert interval(values[:1]) == (-np.inf, np.inf)
    assert bounds(values[:1]) is None


def test_rows_that_belong_together_make_the_interval_as_wide_as_their_groups_do() -> None:
    """Ten rows that are one row ten times say as much as the one."""
    values = np.random.default_rng(0).standard_normal(12)
    groups = Groups(np.repeat(np.arange(12), 10))
    assert interval(np.repeat(values, 10), groups) == pytest.approx(interval(values))
    assert interval(values, Groups(np.zeros(12, np.int64))) == (-np.inf, np.inf)
    assert bounds(values, Groups(np.zeros(12, np.int64))) is None


def test_what_is_nearer_in_one_group_alone_does_not_replace_the_default() -> None:
    nearer = np.repeat([-1.0, 0.1, -0.1, 0.1], [40, 10, 10, 10])
    apart = {"default": np.ones(70), "nearer": 1 + nearer + 0.01 * np.random.default_rng(0).standard_normal(70)}
    assert closer(apart, "default") == "nearer"
    assert closer(apart, "default", Groups(np.repeat(np.arange(4), [40, 10, 10, 10]))) == "default"


def test_intervals_of_groups_of_unlike_size_are_covered() -> None:
    """Half of what a row differs by is its group's; drawn one by one, the interval holds the mean too seldom."""
    draw, held = np.random.default_rng(0), np.zeros(2)
    for _ in range(400):
        numbers = np.repeat(np.arange(40), draw.integers(1, 9, 40))
        values = draw.normal(size=40)[numbers] + draw.normal(size=len(numbers))
        found = interval(values, Groups(numbers)), interval(values)
        held += [low <= 0 <= high for low, high in found]
    assert 0.92 <= held[0] / 400 <= 0.98, held
    assert held[1] / 400 <= 0.85, held


@given(st.dictionaries(st.sampled_from("abcde"), st.tuples(st.floats(0, 1), st.floats(0.01, 1)), min_size=1), st.integers(0, 2**31))
def test_a_candidate_is_taken_only_if_it_is_nearer_than_the_default_beyond_chance(
    candidates: dict[str, tuple[float, float]], seed: int
) -> None:
    """Against paired t tests, with rows that differ far more from each other than the candidates do."""
    random = np.random.default_rng(seed)
    rows = 10 * random.random(12)
    apart = {name: rows + mean + noise * random.standard_normal(12) for name, (mean, noise) in candidates.items()}
    default = next(iter(apart))
    below = {
        name: values
        for name, values in apart.items()
        if name != default and scipy.stats.ttest_rel(values, apart[default]).confidence_interval(0.95).high < 0
    }
    assert closer(apart, default) == min(below, key=lambda name: below[name].mean(), default=default)


def test_what_is_nearer_by_chance_does_not_replace_the_default() -> None:
    apart = {"default": np.array([1.0, 1.0, 1.0, 1.0]), "lucky": np.array([0.0, 1.2, 1.2, 1.2]), "better": np.full(4, 0.95)}
    assert closer({name: apart[name] for name in ("default", "lucky")}, "default") == "default"
    assert closer(apart, "default") == "better"


@given(st.integers(1, 2000), st.integers(1, 600))
def test_rows_are_spread_evenly(num: int, count: int) -> None:
    rows = spread([str(i) for i in range(num)], count)
    assert len(rows) == min(num, count)
    steps = np.diff([int(row) for row in rows])
    assert num <= count or len(steps) == 0 or (steps.min() >= num // count and steps.max() <= -(-num // count))


def scales_of(layers: dict[str, torch.nn.Linear]) -> dict[str, LayerScales]:
    return {name: LayerScales(weight_scale(layer.weight.detach(), 127), torch.tensor(0.05), 8) for name, layer in layers.items()}


def test_the_float_layers_come_back(bert: Artifact) -> None:
    model = load(bert.path)
    layers = {name: layer for name, layer in linears(model).items() if "encoder" in name}
    ids = {"input_ids": torch.arange(5, 11)[None]}
    with torch.inference_mode():
        before = forward(model, ids)
        with in_int8(model, layers, scales_of(layers)):
            assert all(isinstance(model.get_submodule(name), Int8Linear) for name in layers)
            assert not torch.equal(forward(model, ids), before)
        assert torch.equal(forward(model, ids), before)
        with pytest.raises(RuntimeError, match="no power"), in_int8(model, layers, scales_of(layers)):
            raise RuntimeError("no power")
    assert all(model.get_submodule(name) is layer for name, layer in layers.items())


def test_a_trial_compares_with_what_the_model_was_in_float(bert: Artifact, context: Context, told) -> None:
    model = load(bert.path)
    layers = {name: layer for name, layer in linears(model).items() if "encoder" in name}
    trial = Trial.prepare(model, bert.path, [], context)
    assert (trial.rows, trial.measure, trial.distance({}, {})) == (context.data.selection.rows, "kl", 0)
    near, far = scales_of(layers), {name: replace(scales, input_scale=torch.tensor(1.0)) for name, scales in scales_of(layers).items()}
    assert 0 < trial.distance(layers, near) < trial.distance(layers, far)
    assert not told.lines


def test_without_selection_rows_calibration_rows_are_taken_and_the_log_says_so(bert: Artifact, context: Context, told) -> None:
    alone = replace(context, data=replace(context.data, selection=EMPTY, evaluation=None))  # type: ignore[arg-type]
    rows = context.data.train.rows * 5
    trial = Trial.prepare(load(bert.path), bert.path, rows, alone)
    assert trial.rows == spread(rows, TRIAL_ROWS)
    assert told.lines == ["  no selection split: choices are made on calibration rows"]


def test_a_look_tells_the_metric_by_labels_too(bert: Artifact, context: Context) -> None:
    model: Any = load(bert.path)
    trial = Trial.prepare(model, bert.path, [], context)
    prepared = Checkpoint(bert.path).preprocessor(context.task, context.max_length, context.target)
    model.classifier.bias.data[1] += 0.5
    selection = context.data.selection
    apart, metric = trial.look()
    expected = predict(model, prepared, selection.rows, 7)
    assert metric == pytest.approx(float(np.mean(expected.argmax(axis=1) == selection.labels.array)))
    assert 0 < apart == pytest.approx(trial.distance_now())
    few = trial.fewer(8)
    assert few.look()[1] == pytest.approx(float(np.mean(expected.argmax(axis=1)[::5] == selection.labels.array[::5])))
    assert Trial.prepare(
        model, bert.path, context.data.train.rows, replace(context, data=replace(context.data, selection=EMPTY))
    ).look() == (
        0.0,
        None,
    )


def test_answers_that_are_compared_are_padded_finely(bert: Artifact, context: Context) -> None:
    prepared = Checkpoint(bert.path).preprocessor(context.task, 40, Target(sequence_lengths=(40,)))
    fine = finely(prepared)
    assert (prepared.buckets, fine.buckets) == ((40,), (16, 32, 40))
    model, rows = load(bert.path), context.data.selection.rows
    np.testing.assert_allclose(predict(model, fine, rows, 8), predict(model, prepared, rows, 8), atol=1e-5)
    assert finely(replace(prepared, max_length=8)).buckets == (8,)


def test_regression_is_measured_by_squared_error(bert: Artifact, context: Context) -> None:
    prepared = Checkpoint(bert.path).preprocessor(context.task, context.max_length, context.target)
    trial = Trial(load(bert.path), prepared, [], replace(context, task="text-regression"), np.zeros((0, 1), np.float32))
    assert trial.measure == "mse"
