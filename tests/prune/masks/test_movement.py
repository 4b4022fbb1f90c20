"""Structured movement: the gradient of a score is the sum of w dL/dw over its unit, the choice keeps to the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from foundation.models.architecture.structure import Structure
from foundation.models.forward import forward
from foundation.training.train import Batch
from prune.cost import ShapeCost
from prune.masks.masks import masked
from prune.masks.movement import StructuredMovement
from prune.selection import Incoming, Limits

KEY = "stages.prune"


def made(model: Any, sparsity: float = 0.5, ratio: float = 1.0) -> StructuredMovement:
    structure = Structure.of(model, KEY)
    cost = ShapeCost.of(model, structure, "macs")
    limits = Limits(("heads", "ffn"), 4, frozenset({(2, "ffn")}), frozenset())

    def loss(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        return {"cross_entropy": functional.cross_entropy(forward(model, batch.features), batch.labels, reduction="none")}

    return StructuredMovement(loss, cost, Incoming.of(cost), sparsity, limits, ratio, 0.5, KEY)


def test_the_gradient_of_a_score_is_the_sum_over_the_weights_of_its_unit(
    make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model("bert")
    movement = made(model, sparsity=0.0)
    batch = Batch(make_features("bert"), torch.tensor([0, 1, 0]), np.arange(3), 0, 10)
    with masked(model, Structure.of(model, KEY), movement.gates()):
        torch.stack(list(movement(model, batch).values())).sum().backward()
    for block, layer in enumerate(model.bert.encoder.layer):
        reader = layer.attention.output.dense.weight
        sums = (reader * reader.grad).detach().sum(dim=0).reshape(4, 4).sum(dim=1)
        torch.testing.assert_close(movement.values[f"heads_{block}"].raw.grad, sums, atol=1e-6, rtol=1e-4)
        if block < 2:
            reader = layer.output.dense.weight
            torch.testing.assert_close(
                movement.values[f"ffn_{block}"].raw.grad, (reader * reader.grad).detach().sum(0), atol=1e-6, rtol=1e-4
            )
    assert "ffn_2" not in movement.values


def test_silent_units_get_a_gradient_too(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model("bert")
    movement = made(model)
    batch = Batch(make_features("bert"), torch.tensor([0, 1, 0]), np.arange(3), 9, 10)
    with masked(model, Structure.of(model, KEY), movement.gates()):
        sum(movement(model, batch).values()).sum().backward()
    closed = movement.open["ffn_0"] == 0
    assert closed.any()
    assert (movement.values["ffn_0"].raw.grad[closed] != 0).any()
    assert model.bert.encoder.layer[0].output.dense.weight.grad[:, closed].abs().max() == 0


def test_everything_is_open_before_the_first_choice(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model, features = make_model("bert"), make_features("bert")
    expected = forward(model, features)
    with masked(model, Structure.of(model, KEY), made(model).gates()):
        torch.testing.assert_close(forward(model, features), expected)


def test_what_is_open_are_the_best_that_fit(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    movement = made(model, ratio=5.0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in movement.values.values():
            value.raw.copy_(torch.randn(value.raw.shape, generator=draw))
    whole = 3 * (4 * 16 * 16 + 2 * 16 * 24)
    costs = []
    for step in range(10):
        share = movement.share(step, 10)
        assert share == pytest.approx(1 - 0.5 * (1 - (1 - min(1, (step + 1) / 5)) ** 3))
        movement.choose(share)
        cost = 2 * 16 * 24 + sum(
            float(mask.sum()) * (4 * 16 * 4 if name.startswith("heads") else 2 * 16) for name, mask in movement.open.items()
        )
        costs.append(cost)
        assert cost <= share * whole * (1 + 1e-9)
        for name, mask in movement.open.items():
            score = movement.values[name]().detach()
            assert mask.all() or score[mask == 1].min() >= score[mask == 0].max()
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] > 0.4 * whole
