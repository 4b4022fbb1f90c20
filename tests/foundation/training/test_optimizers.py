"""Optimizers against the formulas of their papers, and in a training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foundation.labels.classes import ClassIds
from foundation.machine.parallel import ALONE, Team
from foundation.training.choices import Optimizer, OptimizerName
from foundation.training.finetune import Finetune
from foundation.training.optimizers import Lamb, Lars, check_optimizer, optimizer_of
from prune.choices import Recover
from quantize.choices import Qat
from tests.foundation.training.test_train import learns_and_continues
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

NAMES: tuple[OptimizerName, ...] = ("adamw", "adafactor", "lamb", "lars")


@pytest.fixture(scope="module")
def sentences(words: list[str]) -> tuple[list[str], ClassIds]:
    rows = [f"{first} {second} film" for first in words[:5] for second in words[5:9]]
    return rows, ClassIds(np.array(["good" in row.split() for row in rows], np.int64))


def lamb_by_hand(weights: list[list[float]], gradients: list[list[list[float]]], rate: float, decay: float, scaled: bool) -> list[float]:
    """Algorithm 2 of You et al. 2020 with numbers one at a time: the weights after all steps."""
    w = [value for row in weights for value in row]
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, gradient in enumerate(gradients, 1):
        g = [value for row in gradient for value in row]
        update = []
        for i in range(len(w)):
            m[i] = 0.9 * m[i] + 0.1 * g[i]
            v[i] = 0.999 * v[i] + 0.001 * g[i] ** 2
            ratio = (m[i] / (1 - 0.9**t)) / (math.sqrt(v[i] / (1 - 0.999**t)) + 1e-6)
            update.append(ratio + decay * w[i])
        norm_w, norm_u = (math.sqrt(sum(value**2 for value in each)) for each in (w, update))
        trust = norm_w / norm_u if scaled and norm_w and norm_u else 1.0
        w = [value - rate * trust * change for value, change in zip(w, update, strict=True)]
    return w


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("start", [1.0, 0.0])
def test_lamb_is_algorithm_2(scaled: bool, start: float) -> None:
    weight = nn.Parameter(start * torch.randn(3, 4, dtype=torch.float64))
    before, gradients = weight.tolist(), torch.randn(5, 3, 4, dtype=torch.float64)
    optimizer = Lamb([{"params": [weight], "weight_decay": 0.1, "scaled": scaled}], 0.02)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    expected = lamb_by_hand(before, gradients.tolist(), 0.02, 0.1, scaled)
    torch.testing.assert_close(weight.detach().flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_a_step_of_lamb_is_as_long_as_the_weight() -> None:
    weight = nn.Parameter(torch.randn(6, 5))
    before = weight.detach().clone()
    optimizer = Lamb([{"params": [weight], "weight_decay": 0.0}], 0.01)
    weight.grad = 1e3 * torch.randn(6, 5)
    optimizer.step()
    assert float((weight.detach() - before).norm()) == pytest.approx(0.01 * float(before.norm()), rel=1e-4)


def lars_by_hand(weights: list[list[float]], gradients: list[list[list[float]]], rate: float, decay: float, scaled: bool) -> list[float]:
    """Algorithm 1 of You, Gitman & Ginsburg 2017 with numbers one at a time and a trust coefficient of 1: the weights after all steps."""
    w = [value for row in weights for value in row]
    v = [0.0] * len(w)
    for gradient in gradients:
        g = [value for row in gradient for value in row]
        norm_w, norm_g = (math.sqrt(sum(value**2 for value in each)) for each in (w, g))
        local = norm_w / (norm_g + decay * norm_w) if scaled and norm_w and norm_g else 1.0
        for i in range(len(w)):
            v[i] = 0.9 * v[i] + rate * local * (g[i] + decay * w[i])
        w = [value - change for value, change in zip(w, v, strict=True)]
    return w


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("start", [1.0, 0.0])
def test_lars_is_algorithm_1(scaled: bool, start: float) -> None:
    weight = nn.Parameter(start * torch.randn(3, 4, dtype=torch.float64))
    before, gradients = weight.tolist(), torch.randn(5, 3, 4, dtype=torch.float64)
    gradients[2] = 0  # a batch without a gradient moves by its momentum
    optimizer = Lars([{"params": [weight], "weight_decay": 0.1, "scaled": scaled}], 0.02)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    expected = lars_by_hand(before, gradients.tolist(), 0.02, 0.1, scaled)
    torch.testing.assert_close(weight.detach().flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("times", [1e-4, 1e4])
def test_the_size_of_a_gradient_does_not_matter_to_lars(times: float) -> None:
    start, gradient = torch.randn(6, 5), torch.randn(6, 5)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    for weight, given in zip(weights, (gradient, times * gradient), strict=True):
        optimizer = Lars([{"params": [weight], "weight_decay": 0.0}], 0.01)
        weight.grad = given
        optimizer.step()
    torch.testing.assert_close(*weights)
    assert float((weights[0] - start).norm()) == pytest.approx(0.01 * float(start.norm()), rel=1e-4)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_matrices_alone_are_scaled(name: OptimizerName) -> None:
    layer = nn.Linear(3, 3)
    optimizer = optimizer_of(Optimizer(name=name), layer, 0.1, 0.1)
    found = {id(weight): (group["scaled"], group["weight_decay"]) for group in optimizer.param_groups for weight in group["params"]}
    assert found == {id(layer.weight): (True, 0.1), id(layer.bias): (False, 0.0)}


def adafactor_by_hand(weight: Tensor, gradients: Tensor, rate: float) -> Tensor:
    """Algorithm 4 of Shazeer & Stern 2018 with the decay 1 - t^-0.8, for a matrix, without weight decay."""
    w = weight.clone()
    rows, columns = torch.zeros(len(w), 1, dtype=w.dtype), torch.zeros(1, w.shape[1], dtype=w.dtype)
    for t, gradient in enumerate(gradients, 1):
        kept = 1 - t**-0.8
        rows = kept * rows + (1 - kept) * gradient.square().mean(dim=1, keepdim=True)
        columns = kept * columns + (1 - kept) * gradient.square().mean(dim=0, keepdim=True)
        update = gradient / (rows @ columns / rows.mean()).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        relative = max(1e-3, float(w.square().mean().sqrt())) * min(rate, 1 / math.sqrt(t))
        w = w - relative * update
    return w


def test_adafactor_is_algorithm_4() -> None:
    layer = nn.Linear(4, 3, bias=False).double()
    before, gradients = layer.weight.detach().clone(), torch.randn(5, 3, 4, dtype=torch.float64)
    optimizer = optimizer_of(Optimizer(name="adafactor"), layer, 0.01, 0.0)
    for gradient in gradients:
        layer.weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), adafactor_by_hand(before, gradients, 0.01), rtol=1e-6, atol=1e-9)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", NAMES)
def test_trainings_learn_and_continue(name: OptimizerName, tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"optimizer": Optimizer(name=name), "learning_rate": 3e-3 if name == "adamw" else 2e-2, "epochs": 10}
    learns_and_continues(tiny_bert, sentences, told, tmp_path, **usual)


def test_adafactor_is_refused_where_rows_are_divided() -> None:
    check_optimizer(Optimizer(name="adafactor"), Team(0, 2, "ddp"), "stages.finetune")
    check_optimizer(Optimizer(name="lamb"), Team(0, 2, "fsdp2"), "stages.finetune")
    check_optimizer(Optimizer(name="adafactor"), ALONE, "stages.finetune")
    divides = "parallel: {strategy: fsdp2}, which divides the rows"
    with raises_problem("stages.finetune.optimizer", "adafactor", divides, "give adamw, adamw8bit, lamb or lars,"):
        check_optimizer(Optimizer(name="adafactor"), Team(0, 2, "fsdp2"), "stages.finetune")


@pytest.mark.parametrize("settings", [Finetune, Recover, Qat])
def test_recipes_without_it_keep_their_cache_keys(settings: Any) -> None:
    assert "optimizer" not in settings().model_dump()
    assert settings(optimizer={"name": "lamb"}).model_dump()["optimizer"] == {"name": "lamb"}
