"""Masks that are learned jointly: expected sizes and the Lagrangian against written-out sums, gradients against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from compress.structure import Structure
from compress.train import Batch
from prune.cost import Cost
from prune.hard_concrete import OPEN, fixed, present
from prune.joint import MASK_RATE, Joint, Learn, Scaled, mask_rate
from prune.latency_table import Curve, LatencyTable
from prune.selection import Granularity, Limits
from prune.timing import LatencyCost

KEY = "stages.prune"
ALL: tuple[Granularity, ...] = ("layers", "hidden", "heads", "ffn")


def made(model: Any, granularity: tuple[Granularity, ...] = ALL, **changes: Any) -> Joint:
    structure = Structure.of(model, KEY)
    cost = Cost.of(model, structure, "macs")
    limits = Limits(granularity, 4, changes.pop("protected", frozenset()), changes.pop("blocks", frozenset()))
    loss: Any = lambda model, batch: {"nothing": torch.zeros(len(batch.indices))}  # noqa: E731
    settings = {"ratio": 10.0, "warmup": 0.5, "sparsity": 0.6, **changes}
    joint = Joint(loss, cost, cost.total(), limits=limits, **settings)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for mask in joint.masks.values():
            mask.raw.copy_(torch.randn(mask.raw.shape, generator=draw) * 0.2)  # type: ignore[operator, union-attr]
    return joint


def expected_macs(joint: Joint, model: Any) -> float:
    """Sums up, weight by weight, the chance that both of its ends are there."""
    chance = {name: present(mask()).tolist() for name, mask in joint.masks.items()}
    hidden, total = sum(chance["hidden"]), 0.0
    for block in range(3):
        heads = sum(chance[f"heads_{block}"]) * chance[f"all_heads_{block}"][0] * 4  # numbers of a head
        neurons = sum(chance[f"ffn_{block}"]) * chance[f"all_ffn_{block}"][0]
        total += chance[f"layer_{block}"][0] * (4 * hidden * heads + 2 * hidden * neurons)
    return total


def test_the_expected_cost_is_that_of_the_expected_sizes(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    joint = made(model)
    before = 3 * (4 * 16 * 16 + 2 * 16 * 24)
    assert float(joint.expected_sparsity().detach()) == pytest.approx(1 - expected_macs(joint, model) / before, rel=1e-5)


def test_the_lagrangian_pulls_to_the_sparsity_and_its_multipliers_rise(make_model: Callable[..., Any]) -> None:
    joint = made(make_model("bert"))
    with torch.no_grad():
        joint.lambda_1.raw.fill_(0.3)
        joint.lambda_2.raw.fill_(0.2)
    for step, target in ((0, 0.6 / 5), (2, 0.6 * 3 / 5), (4, 0.6), (9, 0.6)):
        gap = float(joint.expected_sparsity().detach()) - target
        assert float(joint.penalty(step, 10).detach()) == pytest.approx(3.0 * gap + 2.0 * gap**2, rel=1e-4)
    joint.penalty(9, 10).backward()
    gap = float(joint.expected_sparsity().detach()) - 0.6
    assert joint.lambda_1.raw.grad is not None
    assert joint.lambda_2.raw.grad is not None
    assert float(joint.lambda_1.raw.grad) == pytest.approx(-gap, rel=1e-4)  # descent on it is ascent
    assert float(joint.lambda_2.raw.grad) == pytest.approx(-(gap**2), rel=1e-4)
    for name in ("heads_1", "all_ffn_0", "layer_2", "hidden"):
        mask: Any = joint.masks[name]
        found, step = float(mask.raw.grad[0]), 1e-3
        values = []
        for change in (step, -step):
            with torch.no_grad():
                mask.raw[0] += change / mask.ratio
                values.append(float(joint.penalty(9, 10).double()))
                mask.raw[0] -= change / mask.ratio
        assert found == pytest.approx((values[0] - values[1]) / (2 * step), rel=0.05, abs=1e-4)  # of the value, not of what Adam moves


def test_adam_moves_a_scaled_vector_at_its_own_rate() -> None:
    torch.manual_seed(0)
    direction = torch.randn(5)
    plain, scaled = torch.nn.Parameter(torch.ones(5)), Scaled(torch.ones(5), 50.0)
    rising = Scaled(torch.ones(5), 50.0, ascends=True)
    optimizers = [
        torch.optim.AdamW([{"params": [value], "lr": rate, "weight_decay": 0.0}])
        for value, rate in ((plain, 0.05), (scaled.raw, 0.001), (rising.raw, 0.001))
    ]
    for number in range(4):
        for value, optimizer in zip((lambda: plain, scaled, rising), optimizers, strict=True):
            optimizer.zero_grad()
            (value() * direction * (1 + number)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(scaled(), plain, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rising() - 1, 1 - plain, atol=1e-5, rtol=1e-4)


def test_the_multipliers_bring_the_masks_to_the_sparsity(make_model: Callable[..., Any]) -> None:
    joint = made(make_model("bert"), ratio=100.0)
    with torch.no_grad():
        for mask in joint.masks.values():
            mask.raw.fill_(OPEN / 100)  # type: ignore[operator, union-attr]
    optimizer = torch.optim.AdamW([{"params": list(joint.parameters()), "lr": 1e-3, "weight_decay": 0.0}])
    for step in range(200):
        optimizer.zero_grad()
        joint.penalty(step, 200).backward()
        optimizer.step()
    assert float(joint.expected_sparsity().detach()) == pytest.approx(0.6, abs=0.03)


def test_protected_parts_have_no_masks(make_model: Callable[..., Any]) -> None:
    joint = made(make_model("bert"), protected=frozenset({(0, "heads"), (0, "ffn")}), blocks=frozenset({0}))
    assert not [name for name in joint.masks if name.endswith("_0")]
    scores = joint.scores()
    assert scores.components[0, "heads"].tolist() == [1.0] * 4
    assert float(scores.layers[0]) == 1.0
    assert float(scores.layers[1]) < 1.0
    assert (0, "heads") not in joint.gates()


def test_gates_are_drawn_in_training_and_without_noise_otherwise(make_model: Callable[..., Any]) -> None:
    joint, model = made(make_model("bert")), make_model("bert")
    batch = Batch({}, torch.zeros(2), np.arange(2), 0, 10)
    torch.manual_seed(0)
    parts = joint(model, batch)
    assert {name: part.shape for name, part in parts.items()} == {"nothing": (2,), "sparsity": (2,)}
    first = joint.gates()[1, "ffn"](True).clone()
    joint(model, batch)
    assert not torch.equal(joint.gates()[1, "ffn"](True), first)
    fixed = joint.gates()[1, "ffn"](False)
    assert torch.equal(fixed, joint.gates()[1, "ffn"](False))


def test_milliseconds_take_the_place_of_multiplications(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    table = LatencyTable(0.5, 0.1, Curve((1, 2, 4), (0.0, 0.3, 0.4)), Curve((4, 24), (0.0, 1.0)))
    cost = LatencyCost(structure, table)
    assert cost.total() == pytest.approx(3 * 1.5)
    assert cost.prices(0, "heads") == pytest.approx((0.0, 0.0, 0.3, 0.35, 0.4))
    counts: Any = {(0, "heads"): torch.tensor(3.0, requires_grad=True), (1, "ffn"): torch.tensor(14.0)}
    present_L = torch.tensor([1.0, 0.5, 1.0])
    found = cost.expected(counts, 16, present_L)
    assert float(found.detach()) == pytest.approx((0.1 + 0.35 + 1.0) + 0.5 * (0.1 + 0.4 + 0.5) + 1.5)
    found.backward()
    assert float(counts[0, "heads"].grad) == pytest.approx(0.05)


def test_the_rate_of_masks_lets_them_cross_in_short_trainings() -> None:
    assert mask_rate(Learn(), 100_000) == MASK_RATE
    assert mask_rate(Learn(), 100) * 100 == pytest.approx(4 * 2 * OPEN)
    assert mask_rate(Learn(mask_learning_rate=0.5), 100) == 0.5


def test_a_unit_stands_under_the_gate_of_all_of_its_kind(make_model: Callable[..., Any]) -> None:
    joint = made(make_model("bert"))
    gates, scores = joint.gates(), joint.scores()
    with torch.no_grad():
        for block in range(3):
            for what in ("heads", "ffn"):
                unit, whole = joint.masks[f"{what}_{block}"](), joint.masks[f"all_{what}_{block}"]()
                assert 0 < float(present(whole)) < 1
                torch.testing.assert_close(gates[block, what](False), fixed(unit) * fixed(whole), atol=0, rtol=0)
                torch.testing.assert_close(scores.components[block, what], present(unit) * present(whole), atol=0, rtol=0)
            assert torch.equal(gates[block, "layer"](False), fixed(joint.masks[f"layer_{block}"]()))
    assert any(float(fixed(joint.masks[f"all_{what}_{block}"]()).detach()) < 1 for block in range(3) for what in ("heads", "ffn"))
    joint.drawn = {name: torch.full_like(mask.raw, 0.5) for name, mask in joint.masks.items()}  # type: ignore[arg-type]
    assert gates[0, "heads"](True).tolist() == [0.25] * 4
