"""Masks that are learned jointly: expected sizes and the penalty against written-out sums, gradients against differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foundation.models.architecture.structure import Structure
from foundation.training.train import Batch
from prune.choices import Granularity, Learn
from prune.cost import ShapeCost
from prune.latency.cost import LatencyCost
from prune.latency.table import Curve, LatencyTable
from prune.masks.hard_concrete import BOUND, OPEN, draw, fixed, present
from prune.masks.joint import MASK_RATE, UNDECIDED, Joint, Scaled, Shared, mask_rate
from prune.selection import Incoming, Limits
from tests.seldom import seldom

pytestmark = pytest.mark.whole

KEY = "stages.prune"
ALL: tuple[Granularity, ...] = ("layers", "hidden", "heads", "ffn")


def made(model: Any, granularity: tuple[Granularity, ...] = ALL, **changes: Any) -> Joint:
    structure = Structure.of(model, KEY)
    cost = ShapeCost.of(model, structure, "macs")
    limits = Limits(granularity, 4, changes.pop("protected", frozenset()), changes.pop("blocks", frozenset()))
    loss: Any = lambda model, batch: {"nothing": torch.zeros(len(batch.indices))}  # noqa: E731
    settings = {"ratio": 10.0, "warmup": 0.5, "sparsity": 0.6, **changes}
    joint = Joint(loss, cost, Incoming.of(cost), limits=limits, **settings)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        joint.log_alpha.raw.copy_(torch.randn(joint.log_alpha.raw.shape, generator=generator) * 0.2)
    return joint


def masks(joint: Joint) -> dict[str, torch.Tensor]:
    return {name: mask.detach() for name, mask in joint.named(joint.log_alpha()).items()}


def expected_macs(joint: Joint, model: Any) -> float:
    """Sums up, weight by weight, the chance that both of its ends are there."""
    chance = {name: present(mask).tolist() for name, mask in masks(joint).items()}
    hidden, total = sum(chance["hidden"]), 0.0
    for block in range(3):
        heads = sum(chance[f"heads_{block}"]) * 4  # numbers of a head
        neurons = sum(chance[f"ffn_{block}"])
        total += chance[f"layer_{block}"][0] * (4 * hidden * heads + 2 * hidden * neurons)
    return total


def test_the_expected_cost_is_that_of_the_expected_sizes(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    joint = made(model)
    before = 3 * (4 * 16 * 16 + 2 * 16 * 24)
    assert joint.expected_sparsity() == pytest.approx(1 - expected_macs(joint, model) / before, rel=1e-5)


def test_what_is_there_beyond_what_was_asked_for_costs_its_price(make_model: Callable[..., Any]) -> None:
    joint = made(make_model("bert"))
    joint.price.update = lambda step, gap, slope_N: 3.0  # type: ignore[method-assign]
    for step, target in ((0, 0.6 / 5), (2, 0.6 * 3 / 5), (4, 0.6), (9, 0.6)):
        assert float(joint.penalty(step, 10).detach()) == pytest.approx(3.0 * (target - joint.expected_sparsity()), rel=1e-4, abs=1e-6)
    joint.penalty(9, 10).backward()
    found, step_size, raw = joint.log_alpha.raw.grad, 1e-2, joint.log_alpha.raw
    assert found is not None
    for place in (0, 5, len(raw) // 2, len(raw) - 1):
        values = []
        for change in (step_size, -step_size):
            raw.data[place] += change / joint.log_alpha.ratio
            values.append(float(joint.penalty(9, 10).detach().double()))
            raw.data[place] -= change / joint.log_alpha.ratio
        # of the value, not of what Adam moves
        assert float(found[place]) == pytest.approx((values[0] - values[1]) / (2 * step_size), rel=0.05, abs=1e-4)


def test_the_price_sees_the_gap_the_slope_and_the_gradient_of_the_loss_alone(make_model: Callable[..., Any]) -> None:
    joint, model, told = made(make_model("bert")), make_model("bert"), []
    weights = torch.linspace(-1, 1, len(joint.log_alpha.raw))
    joint.price.update = lambda step, gap, slope_N: told.append((step, gap, slope_N)) or 7.0  # type: ignore[method-assign, func-returns-value]

    def loss(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        drawn = torch.cat(list(joint.drawn.values()))
        return {"linear": (drawn * weights).sum().expand(2) / 2}

    joint.loss = loss
    parts = joint(model, Batch({}, torch.zeros(2), np.arange(2), 3, 10))
    step, gap, slope_N = told[0]
    log_alpha_N = joint.log_alpha().detach().requires_grad_()
    (slope,) = torch.autograd.grad(joint.removed(log_alpha_N), log_alpha_N)
    assert (step, gap) == (3, pytest.approx(joint.expected_sparsity() - 0.6 * 4 / 5))
    torch.testing.assert_close(slope_N, slope)
    noise = joint.shared.noise(3)
    drawn = torch.cat([draw(mask, noise) for mask in joint.named(log_alpha_N).values()])
    (gradient,) = torch.autograd.grad((drawn * weights).sum(), log_alpha_N)
    sum(part.sum() for part in parts.values()).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(joint.price.gradient_N, gradient)
    torch.testing.assert_close(joint.log_alpha.raw.grad, gradient - 2 * 7.0 * slope, atol=1e-5, rtol=1e-4)


def test_each_step_draws_gates_that_are_the_same_in_all_its_micro_batches_and_processes(make_model: Callable[..., Any]) -> None:
    def drawn(step: int, seed: int, of_torch: int) -> torch.Tensor:
        joint = made(make_model("bert"), shared=Shared(seed))
        joint.loss = lambda model, batch: {}
        torch.manual_seed(of_torch)
        joint(None, Batch({}, torch.zeros(2), np.arange(2), step, 10))
        return torch.cat(list(joint.drawn.values())).detach()

    assert torch.equal(drawn(3, seed=5, of_torch=0), drawn(3, seed=5, of_torch=1))
    others = [drawn(3, 5, 0), drawn(4, 5, 0), drawn(3, 6, 0), drawn(4, 6, 0)]
    assert all(not torch.equal(one, other) for number, one in enumerate(others) for other in others[:number])


def test_adam_moves_a_scaled_vector_at_its_own_rate() -> None:
    torch.manual_seed(0)
    direction = torch.randn(5)
    plain, scaled = torch.nn.Parameter(torch.ones(5)), Scaled(torch.ones(5), 50.0)
    optimizers = [
        torch.optim.AdamW([{"params": [value], "lr": rate, "weight_decay": 0.0}]) for value, rate in ((plain, 0.05), (scaled.raw, 0.001))
    ]
    for number in range(4):
        for value, optimizer in zip((lambda: plain, scaled), optimizers, strict=True):
            optimizer.zero_grad()
            (value() * direction * (1 + number)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(scaled(), plain, atol=1e-5, rtol=1e-4)


CASES: list[tuple[tuple[Granularity, ...], int, float]] = [
    (("heads", "ffn"), 300, 0.3),
    (("heads", "ffn"), 300, 0.6),
    (("heads", "ffn"), 60, 0.5),
    (("heads", "ffn"), 600, 0.9),
    (("hidden",), 300, 0.3),
    (("hidden", "heads", "ffn"), 300, 0.6),
    (("layers", "hidden", "heads", "ffn"), 300, 0.5),
]
"""Granularity, steps, sparsity."""
SIZES = (0.01, 100.0)
SIZED = [(*case, size) for case in CASES for size in SIZES]
QUICK = {(*CASES[at], size) for at, size in ((1, 0.01), (2, 100.0), (4, 0.01), (6, 100.0))}
"""Much and little at once, few steps, and every granularity, each with one size of the loss."""


@pytest.mark.first(1)
@pytest.mark.parametrize("case", seldom(SIZED, {*SIZED} - QUICK), ids=str)
def test_masks_end_at_the_sparsity_whatever_the_size_of_the_loss(
    make_model: Callable[..., Any], case: tuple[tuple[Granularity, ...], int, float, float]
) -> None:
    granularity, steps, sparsity, size = case
    ratio = mask_rate(Learn(), steps) / 1e-3
    joint = made(make_model("bert"), granularity, sparsity=sparsity, ratio=ratio)
    draw_worth = torch.Generator().manual_seed(1)
    worth = {key: torch.exp(torch.randn(len(gate(False)), generator=draw_worth)) for key, gate in joint.gates().items()}
    with torch.no_grad():
        joint.log_alpha.raw.fill_(OPEN / ratio)

    def loss(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        gone = sum(((1 - gate(True)) * worth[key]).sum() / worth[key].sum() for key, gate in joint.gates().items())
        return {"worth": size * torch.as_tensor(gone).square().expand(1)}

    joint.loss = loss
    optimizer = torch.optim.AdamW([{"params": list(joint.parameters()), "lr": 1e-3, "weight_decay": 0.0}])
    torch.manual_seed(0)
    for step in range(steps):
        optimizer.zero_grad()
        sum(part.sum() for part in joint(None, Batch({}, torch.zeros(1), np.arange(1), step, steps)).values()).backward()  # type: ignore[union-attr, arg-type]
        optimizer.step()
    assert joint.expected_sparsity() == pytest.approx(sparsity, abs=0.05)
    left = {key: gate(False).detach() for key, gate in joint.gates().items()}
    closed, opened = (torch.cat([worth[key][keep(left[key])] for key in left]) for keep in (lambda z: z < 0.5, lambda z: z >= 0.5))
    assert float(opened.mean()) > 1.2 * float(closed.mean())


def test_protected_parts_have_no_masks(make_model: Callable[..., Any]) -> None:
    joint = made(make_model("bert"), protected=frozenset({(0, "heads"), (0, "ffn")}), blocks=frozenset({0}))
    assert not [name for name in joint.sizes if name.endswith("_0")]
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
    joint(model, replace(batch, step=1))
    assert not torch.equal(joint.gates()[1, "ffn"](True), first)
    fixed = joint.gates()[1, "ffn"](False)
    assert torch.equal(fixed, joint.gates()[1, "ffn"](False))


def test_gates_have_no_noise_before_the_first_batch(make_model: Callable[..., Any]) -> None:
    gate = made(make_model("bert")).gates()[1, "ffn"]
    assert torch.equal(gate(True), gate(False))


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


def test_gates_and_scores_are_those_of_the_masks(make_model: Callable[..., Any]) -> None:
    joint = made(make_model("bert"))
    gates, scores, known = joint.gates(), joint.scores(), masks(joint)
    assert len(gates) == 3 * 3 + 1
    for block in range(3):
        for what in ("heads", "ffn"):
            torch.testing.assert_close(gates[block, what](False).detach(), fixed(known[f"{what}_{block}"]))
            torch.testing.assert_close(scores.components[block, what], present(known[f"{what}_{block}"]))  # type: ignore[index]
        torch.testing.assert_close(gates[block, "layer"](False).detach(), fixed(known[f"layer_{block}"]))
        torch.testing.assert_close(scores.layers[block], known[f"layer_{block}"].sigmoid()[0])
    torch.testing.assert_close(gates["hidden"](False).detach(), fixed(known["hidden"]))
    torch.testing.assert_close(scores.hidden, known["hidden"].sigmoid())
    joint.drawn = {name: torch.full_like(mask, 0.5) for name, mask in known.items()}
    assert gates[0, "heads"](True).tolist() == [0.5] * 4


def test_blocks_are_there_or_not_in_the_last_quarter(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    joint = made(model, ("layers", "heads", "ffn"), sparsity=0.5)
    with torch.no_grad():
        for name, mask in zip(joint.sizes, torch.split(joint.log_alpha.raw, list(joint.sizes.values())), strict=True):
            if name.startswith("layer"):
                mask.fill_({"layer_0": -0.05, "layer_1": 0.3, "layer_2": 0.02}[name])
    joint(model, Batch({}, torch.zeros(1), np.arange(1), 74, 100))
    assert 0 < float(joint.gates()[2, "layer"](False).detach()) < 1
    before = joint.expected_sparsity()
    joint(model, Batch({}, torch.zeros(1), np.arange(1), 75, 100))
    again = made(model, ("layers", "heads", "ffn"), sparsity=0.5)
    again.load_state_dict(joint.state_dict())
    for each in (joint, again):
        each(model, Batch({}, torch.zeros(1), np.arange(1), 76, 100))
        for training in (True, False):
            assert [float(each.gates()[block, "layer"](training).detach()) for block in range(3)] == [0, 1, 1]
        assert each.scores().layers.tolist() == [0, 1, 1]
    assert joint.expected_sparsity() != before
    with torch.no_grad():
        joint.log_alpha.raw.copy_(joint.log_alpha.raw.flip(0))
    assert joint.scores().layers.tolist() == [0, 1, 1]  # whatever is learned afterwards


def test_blocks_are_decided_by_the_budget_too(make_model: Callable[..., Any]) -> None:
    joint = made(make_model("bert"), ("layers",), sparsity=0.34)
    with torch.no_grad():
        joint.log_alpha.raw.copy_(torch.tensor([-0.2, 0.3, -0.1]))  # two are rather closed, of which the budget holds one
    joint.decide()
    assert joint.decided_L.tolist() == [0, 1, 0]
    parts = joint(None, Batch({}, torch.zeros(1), np.arange(1), 90, 100))  # type: ignore[arg-type]
    assert float(parts["sparsity"]) == 0  # nothing is left that it could move
    joint.sparsity = 0.3
    joint.decided_L.fill_(UNDECIDED)
    joint.decide()
    assert joint.decided_L.tolist() == [0, 1, 1]


def test_no_more_is_asked_for_than_gates_can_come_to(make_model: Callable[..., Any]) -> None:
    joint = made(make_model("bert"), ("heads", "ffn"), sparsity=0.99)
    with torch.no_grad():
        joint.log_alpha.raw.fill_(-BOUND / joint.log_alpha.ratio)
    assert 0.9 < joint.target(9, 10) == pytest.approx(joint.expected_sparsity(), abs=1e-6)
    assert made(make_model("bert"), ("heads", "ffn"), sparsity=0.9).target(9, 10) == 0.9
