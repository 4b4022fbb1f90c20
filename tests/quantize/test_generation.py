"""Quantizing a causal language model: which layers, how its distance is measured in little memory, and that it learns in int8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import torch

from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.data.splits import Split
from foundation.labels.next_token import labels_of
from foundation.measure import closeness as trials
from foundation.measure.metrics import metrics
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.forward import forward
from foundation.schemes.checkpoint import load_quantization
from foundation.stage.context import Context
from foundation.training.distillation.distilled import Distilled
from foundation.training.losses.table import losses_of
from foundation.training.train import Batch
from quantize.budget import Budget
from quantize.quantize import Quantize
from quantize.trial import Trial
from tests.foundation import tiny_gpt

pytestmark = pytest.mark.whole


@pytest.fixture
def context(told, tmp_path: Path) -> Context:
    return Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(sequence_lengths=(8,)), 0, told, tmp_path / "scratch")


@pytest.fixture
def gpt() -> Artifact:
    return Artifact(tiny_gpt.checkpoint(), {"id": "baseline", "stage": "model"})


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_the_blocks_become_int8_and_the_tied_head_stays_float(kind: str, context: Context, tmp_path: Path) -> None:
    source = Artifact(tiny_gpt.checkpoint(kind), {"id": "baseline", "stage": "model"})
    figures = Quantize(calibration={"rows": 64}, weight_bits=8).run(source, context, tmp_path)  # type: ignore[arg-type]
    scales, kept = load_quantization(tmp_path)
    assert len(scales) == {"gpt2": 8, "mistral": 14}[kind]
    assert kept == {"lm_head": "head"}
    assert figures["rows"] == 64
    before, after = (predict(load(folder), tiny_gpt.prepared(kind), context.data.evaluation.rows, 32) for folder in (source.path, tmp_path))
    perplexities = [metrics("text-generation", answers, context.data.evaluation.labels)["perplexity"] for answers in (before, after)]
    assert 0 < abs(perplexities[1] / perplexities[0] - 1) < 0.01


def test_a_trial_holds_no_logits_and_is_the_mean_divergence_of_a_token(gpt: Artifact, context: Context, monkeypatch) -> None:
    """Against all logits at once, of both models."""
    monkeypatch.setattr("foundation.labels.answer.LOGIT_BYTES", 3 * 8 * tiny_gpt.VOCABULARY)  # three positions at a time
    monkeypatch.setattr(trials, "LOGIT_BYTES", 1)
    monkeypatch.setattr(trials, "LEAST_BLOCKS", 5)
    model = load(gpt.path)
    trial = Trial.prepare(model, gpt.path, [], context)
    assert len(trial.rows) == 5
    assert trial.read is not None
    assert trial.read.shape == (5, tiny_gpt.LENGTH, 32)
    assert trial.answers.shape == (5, tiny_gpt.LENGTH - 1, 2)
    assert trial.measure == "kl"
    assert trial.distances_of({}).mean() == pytest.approx(0, abs=1e-9)
    ids = torch.from_numpy(np.stack(trial.rows).astype(np.int64))  # type: ignore[arg-type]
    name, changed = "transformer.h.1.mlp.c_fc", torch.nn.Linear(32, 128)
    with torch.inference_mode():
        before = forward(model, {"input_ids": ids}).double().numpy()
        with trials.replaced(model, {name: changed}):
            after = forward(model, {"input_ids": ids}).double().numpy()
    p, q = (scipy.special.log_softmax(values, axis=-1) for values in (before, after))
    expected = np.mean(np.sum(np.exp(p) * (p - q), axis=-1), axis=-1)
    np.testing.assert_allclose(trial.distances_of({name: changed}), expected, rtol=1e-4)
    assert trial.distances_of({name: changed}).mean() == pytest.approx(expected.mean(), rel=1e-4)
    np.testing.assert_allclose(trial.fewer(2).distances_of({name: changed}), expected[[0, 2]], rtol=1e-4)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_choice_rests_on_many_blocks_however_large_the_vocabulary(gpt: Artifact, context: Context, monkeypatch) -> None:
    monkeypatch.setattr(trials, "LOGIT_BYTES", 1)
    rows = [np.full(tiny_gpt.LENGTH, number, np.int32) for number in range(70)]
    split = Split(rows, labels_of(rows, tiny_gpt.LENGTH - 1))  # type: ignore[arg-type]
    trial = Trial.prepare(load(gpt.path), gpt.path, [], replace(context, data=replace(context.data, selection=split)))
    assert len(trial.rows) == 64


def test_a_look_at_a_language_model_tells_its_perplexity_too(gpt: Artifact, context: Context) -> None:
    model = load(gpt.path)
    trial = Trial.prepare(model, gpt.path, [], context)
    before = trial.metric_before()
    assert trial.look() == (pytest.approx(0, abs=1e-9), pytest.approx(before))
    with torch.no_grad():
        model.get_submodule("transformer.h.1.mlp.c_fc").weight.mul_(3)  # type: ignore[operator,union-attr]
    apart, metric = trial.look()
    expected = metrics("text-generation", predict(model, tiny_gpt.prepared(), trial.rows, 64), trial.labels)["perplexity"]  # type: ignore[arg-type]
    assert metric == pytest.approx(expected, rel=1e-4)
    assert 0 < apart == pytest.approx(trial.distance_now())


def test_a_trial_leaves_shorter_blocks_out(gpt: Artifact, context: Context) -> None:
    rows = [*context.data.selection.rows[:3], context.data.selection.rows[3][:5]]
    split = Split(rows, labels_of(rows, tiny_gpt.LENGTH - 1))  # type: ignore[arg-type]
    trial = Trial.prepare(load(gpt.path), gpt.path, [], replace(context, data=replace(context.data, selection=split)))
    assert len(trial.rows) == 3


def test_the_budget_is_the_relative_increase_of_perplexity(gpt: Artifact, context: Context) -> None:
    model = load(gpt.path)
    budget = Budget.prepare(model, gpt.path, [], context)  # the model is from outside, and yet the text is its own label
    assert budget.loss(model) == 0
    assert "relative increase of perplexity" in budget.measure
    with torch.no_grad():
        model.get_submodule("transformer.ln_f").weight.mul_(3)  # type: ignore[operator,union-attr]
    split = context.data.selection
    after = metrics("text-generation", predict(model, tiny_gpt.prepared(), split.rows, 64), split.labels)["perplexity"]
    before = metrics("text-generation", budget.logits, split.labels)["perplexity"]
    assert budget.loss(model) == pytest.approx(after / before - 1)


def test_learning_in_int8_keeps_no_logits_of_all_rows(context: Context) -> None:
    model = load(tiny_gpt.checkpoint())
    blocks = context.data.train.rows[:4]
    ids = torch.from_numpy(np.stack(blocks).astype(np.int64))  # type: ignore[arg-type]
    objective = Distilled(load(tiny_gpt.checkpoint()), losses_of("text-generation"), 10**6, 0, 2.0, 0.9)
    assert objective.logits is None
    batch = Batch({"input_ids": ids}, torch.from_numpy(context.data.train.labels.array[:4]), np.arange(4), 0, 1)
    parts = objective(model, batch)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {"cross_entropy": (4,), "teacher": (4,)}
    assert float(parts["teacher"].detach().abs().max()) < 1e-6  # it is its own teacher
    with torch.inference_mode():
        logits = forward(model, {"input_ids": ids})
    expected = [torch.nn.functional.cross_entropy(logits[row, :-1], ids[row, 1:]) for row in range(4)]
    torch.testing.assert_close(parts["cross_entropy"].detach(), 0.1 * torch.stack(expected))


def test_quantization_aware_training_writes_a_checkpoint_that_loads(gpt: Artifact, context: Context, tmp_path: Path) -> None:
    settings = {"epochs": 0.1, "batch_size": 8, "learning_rate": 1e-4}
    figures = Quantize(mode="qat", qat=settings, calibration={"rows": 16}).run(gpt, context, tmp_path)  # type: ignore[arg-type]
    assert figures["qat"]["steps"] > 1
    answers = predict(load(tmp_path), tiny_gpt.prepared(), context.data.selection.rows, 64)
    value = metrics("text-generation", answers, context.data.selection.labels)["perplexity"]
    assert value == pytest.approx(figures["qat"]["selection"][-1]["value"], rel=1e-4)
