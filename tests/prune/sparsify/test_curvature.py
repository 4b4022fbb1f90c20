"""Curvature: the factors against loops, and what they say of a loss that really changes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.labels.next_token import IGNORED
from foundation.labels.tasks import Task
from foundation.training.distillation.distilled import TEMPERATURE
from foundation.training.losses.classes import ClassLoss
from foundation.training.losses.table import losses_of
from foundation.training.train import Batch
from prune.sparsify.curvature import Curvature, curvatures, in_metric, metrics


class Tagger(nn.Module):
    """Two layers over the positions of a row; a third that nothing reads. Padding (id 0) does not reach the answer."""

    def __init__(self, task: Task, classes: int = 3) -> None:
        super().__init__()
        self.task, self.embedding = task, nn.Embedding(7, 5)
        self.inner, self.head, self.unread = nn.Linear(5, 4), nn.Linear(4, classes), nn.Linear(5, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.embedding(input_ids)
        self.unread(x)
        states = self.dropout(self.inner(x).tanh())
        if self.task != "text-generation":
            states = (states * (input_ids != 0)[..., None]).sum(dim=1)
        return SimpleNamespace(logits=self.head(states))


def layers_of(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def batches_of(task: Task, seed: int, rows: int = 5, length: int = 6) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in (rows, 2):
        ids = torch.randint(1, 7, (size, length), generator=generator)
        ids[0, length // 2 :] = 0
        labels = torch.zeros(size, dtype=torch.int64)
        if task == "text-generation":
            labels = torch.where(ids[:, 1:] == 0, IGNORED, ids[:, 1:]).int()
        found.append(Batch({"input_ids": ids}, labels, np.arange(size), 0, 1))
    return found


@given(st.sampled_from(["text-classification", "text-regression", "text-generation"]), st.integers(0, 50))
def test_the_factors_are_those_of_the_loop(task: Task, seed: int) -> None:
    torch.manual_seed(seed)
    model = Tagger(task, 1 if task == "text-regression" else 3).train()
    batches = batches_of(task, seed)
    found = curvatures(model, layers_of(model), batches, task, seed)
    assert model.training
    assert model.dropout.training
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    generator, rows = torch.Generator().manual_seed(seed), sum(len(batch.indices) for batch in batches)
    squares: dict[str, list[tuple[Tensor, Tensor]]] = {"inner": [], "head": []}
    for batch in batches:
        drawn = losses_of(task).drawn_gradient(model(**batch.features).logits.detach(), batch.labels, TEMPERATURE, generator)
        for row in range(len(batch.indices)):  # one at a time, one position at a time
            x = model.embedding(batch.features["input_ids"][row : row + 1])
            inner = model.inner(x)
            states = inner.tanh()
            if task != "text-generation":
                states = (states * (batch.features["input_ids"][row : row + 1] != 0)[..., None]).sum(dim=1)
            logits = model.head(states)
            for pairs, reads, output in ((squares["inner"], x, inner), (squares["head"], states, logits)):
                (dy,) = torch.autograd.grad((logits[0] * drawn[row]).sum(), output, retain_graph=True)
                pairs += zip(reads.flatten(0, -2).detach(), dy.flatten(0, -2), strict=True)
    for name, pairs in squares.items():
        seen = [x_I for x_I, dy_O in pairs if bool((dy_O != 0).any())]
        outputs_O = (torch.stack([dy_O.square() for _, dy_O in pairs]).sum(dim=0) / rows).sqrt()
        inputs_I = (torch.stack([x_I.square() for x_I in seen]).mean(dim=0)).sqrt()
        torch.testing.assert_close(found[name], Curvature(outputs_O, inputs_I), rtol=1e-4, atol=1e-5)
    assert not found["unread"].outputs_O.any()
    assert not found["unread"].inputs_I.any()


def test_padding_and_tokens_that_nothing_predicts_do_not_count() -> None:
    torch.manual_seed(0)
    for task in ("text-classification", "text-generation"):
        model = Tagger(task)
        usual = curvatures(model, layers_of(model), batches_of(task, 1), task, 0)
        with torch.no_grad():
            model.embedding.weight[0] = 100.0
        other = curvatures(model, layers_of(model), batches_of(task, 1), task, 0)
        torch.testing.assert_close(other["inner"].inputs_I, usual["inner"].inputs_I)


@pytest.mark.parametrize("classes", [2, 5])
def test_drawn_gradients_have_the_curvature_of_distillation(classes: int) -> None:
    """E[u u^T] = diag(p) - p p^T, and T^2 KL changes by half of it."""
    logits_C = torch.tensor([1.5, -0.5, 0.3, 2.0, -1.0])[:classes]
    p_C = torch.softmax(logits_C / TEMPERATURE, dim=0)
    expected_CC = torch.diag(p_C) - torch.outer(p_C, p_C)
    drawn = ClassLoss().drawn_gradient(logits_C.expand(200_000, classes), torch.zeros(1), TEMPERATURE, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.T @ drawn / len(drawn), expected_CC, rtol=0.02, atol=4e-3)
    change_C = 0.01 * torch.randn(classes, generator=torch.Generator().manual_seed(1))
    true = ClassLoss().taught((logits_C + change_C)[None].double(), logits_C[None].double(), torch.zeros(1), TEMPERATURE)
    assert float(true) == pytest.approx(float(change_C @ expected_CC @ change_C) / 2, rel=0.02)


def test_a_weight_costs_what_its_entry_says() -> None:
    """Rows that are all alike, so that the factors are exact: half the square of an entry is the loss without that weight."""
    torch.manual_seed(0)
    model = Tagger("text-classification")
    with torch.no_grad():
        model.head.weight.mul_(0.05)  # small, so that the loss is a parabola
    row = torch.tensor([[1, 2, 3]])
    batch = Batch({"input_ids": row.expand(4000, 3)}, torch.zeros(4000), np.arange(4000), 0, 1)
    cost_OI = in_metric(model.head.weight.detach(), curvatures(model, {"head": model.head}, [batch], "text-classification", 0)["head"])
    model.eval()
    before = model(row).logits.detach()
    for output in range(3):
        for place in range(4):
            value = float(model.head.weight.detach()[output, place])
            with torch.no_grad():
                model.head.weight[output, place] = 0
            true = float(ClassLoss().taught(model(row).logits.detach().double(), before.double(), torch.zeros(1), TEMPERATURE))
            with torch.no_grad():
                model.head.weight[output, place] = value
            assert float(cost_OI[output, place].square() / 2) == pytest.approx(true, rel=0.1, abs=1e-9)


def test_values_draw_normal_gradients() -> None:
    drawn = losses_of("text-regression").drawn_gradient(
        torch.zeros(50_000, 1), torch.zeros(1), TEMPERATURE, torch.Generator().manual_seed(0)
    )
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02)
    assert float(drawn.var()) == pytest.approx(1, abs=0.02)


def test_the_metric_keeps_the_norm_of_all_layers_together() -> None:
    weights = {"a": torch.randn(4, 3), "b": 10 * torch.randn(2, 5)}
    found = {name: Curvature(torch.rand(len(weight)), torch.rand(weight.shape[1])) for name, weight in weights.items()}
    scaled = metrics(weights, found)
    norms: Mapping[str, Tensor] = {name: in_metric(weight, scaled[name]) for name, weight in weights.items()}
    assert sum(float(one.square().sum()) for one in norms.values()) == pytest.approx(sum(float(w.square().sum()) for w in weights.values()))
    plain = {name: in_metric(weight, found[name]) for name, weight in weights.items()}
    torch.testing.assert_close(norms["a"] / plain["a"], (norms["b"] / plain["b"])[0, 0].expand(4, 3))  # one factor for all
    nothing = {name: Curvature(torch.zeros(len(weight)), torch.zeros(weight.shape[1])) for name, weight in weights.items()}
    assert not any(in_metric(weight, metrics(weights, nothing)[name]).any() for name, weight in weights.items())
