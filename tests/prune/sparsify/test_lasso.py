"""Group lasso: the penalty against loops, its gradient, reweighting, and which groups go."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.training.train import Batch
from prune.choices import Groups
from prune.sparsify.curvature import Curvature
from prune.sparsify.lasso import (
    EPSILON,
    QUANTILES,
    Lasso,
    Penalty,
    balanced_mask,
    balanced_share,
    beta,
    group_norms,
    layer_mask,
    model_masks,
    pieces,
    quantiles,
    strengths,
)
from prune.sparsify.patterns import Blocks, reachable

SHAPES = st.tuples(st.integers(1, 7), st.integers(1, 9))
BLOCKS = st.tuples(st.integers(1, 4), st.integers(1, 4))


def weight_of(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def groups_of(weight: Tensor, block: tuple[int, int], groups: Groups) -> list[tuple[list[tuple[int, int]], Tensor]]:
    """Written out: the places and values of every group, block by block."""
    found = []
    for top in range(0, weight.shape[0], block[0]):
        for left in range(0, weight.shape[1], block[1]):
            rows = range(top, min(top + block[0], weight.shape[0]))
            columns = range(left, min(left + block[1], weight.shape[1]))
            lines = [[(row, column) for column in columns] for row in rows] if groups in ("rows", "both") else []
            lines += [[(row, column) for row in rows] for column in columns] if groups in ("columns", "both") else []
            found += [(line, torch.stack([weight[place] for place in line])) for line in lines]
    return found


def task(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": torch.ones(len(batch.indices))}


def batch_of(step: int, num_steps: int = 8, rows: int = 3) -> Batch:
    return Batch({}, torch.zeros(rows), np.arange(rows), step, num_steps)


def penalty_of(block: tuple[int, int], groups: Groups, **settings: Any) -> Penalty:
    usual: dict[str, Any] = {"strengths": {"a": 0.3, "b": 0.7}, "reweight": 0.25, "target": 0.5, "together": False}
    rate: Any = settings.pop("rate", lambda step, num_steps: 0.1)
    return Penalty(shapes=pieces(Blocks(*block), groups), rate=rate, **{**usual, **settings})


def lasso(layers: dict[str, nn.Linear], penalty: Penalty) -> Lasso:
    return Lasso(task, layers, penalty, nn.ModuleDict(layers))


def shrunk(weight: Tensor, groups: list[tuple[list[tuple[int, int]], Tensor]], betas: list[float], amount: float) -> Tensor:
    """Written out: the proximal step of one kind of groups, `amount` = eta lambda."""
    found = weight.clone()
    for (places, values), beta_g in zip(groups, betas, strict=True):
        norm = math.sqrt(sum(float(value) ** 2 for value in values))
        factor = max(0.0, 1 - amount * beta_g / norm) if norm else 0.0
        for place in places:
            found[place] = weight[place] * factor
    return found


@given(SHAPES, BLOCKS, st.integers(0, 99), st.sampled_from(["rows", "columns"]), st.floats(0, 3))
def test_the_step_is_that_of_the_loop(shape: tuple[int, int], block: tuple[int, int], seed: int, groups: Groups, strength: float) -> None:
    layers = {"a": nn.Linear(shape[1], shape[0]), "b": nn.Linear(2, 3)}
    layers["a"].weight.data, layers["b"].weight.data = weight_of(shape, seed), weight_of((3, 2), seed + 1)
    lambdas: dict[str, float | None] = {"a": strength, "b": 0.7}
    objective = lasso(layers, penalty_of(block, groups, strengths=lambdas, reweight=1.0))
    expected = {}
    for name, layer in layers.items():
        found = groups_of(layer.weight.detach(), block, groups)
        betas = [1 / (float(values.norm()) + EPSILON) for _, values in found]
        layer.weight.data *= 0.7  # beta is that of the start
        expected[name] = shrunk(layer.weight.detach(), groups_of(layer.weight.detach(), block, groups), betas, 0.1 * lambdas[name])
    parts = objective(nn.Identity(), batch_of(1))
    assert list(parts) == ["loss"]
    for name, layer in layers.items():
        torch.testing.assert_close(layer.weight.detach(), expected[name], rtol=1e-4, atol=1e-6)


@given(SHAPES, BLOCKS, st.integers(0, 99), st.floats(0.01, 2))
def test_the_step_minimizes_its_proximal_problem(shape: tuple[int, int], block: tuple[int, int], seed: int, strength: float) -> None:
    """1/2 ||V - W||^2 + eta lambda sum beta_g ||V_g|| is no smaller anywhere near the answer."""
    layer = nn.Linear(shape[1], shape[0])
    layer.weight.data = weight_of(shape, seed)
    weight, piece = layer.weight.detach().clone(), pieces(Blocks(*block), "rows")[0]
    beta_ST = beta(group_norms(weight, piece))
    lasso({"a": layer}, penalty_of(block, "rows", strengths={"a": strength}, reweight=1.0))(nn.Identity(), batch_of(1))

    def value(candidate: Tensor) -> float:
        return float(0.5 * (candidate - weight).square().sum() + 0.1 * strength * (beta_ST * group_norms(candidate, piece)).sum())

    best = value(layer.weight.detach())
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(5):
            assert value(layer.weight.detach() + size * torch.randn(shape, generator=generator)) >= best - 1e-5


@given(SHAPES, BLOCKS, st.integers(0, 99), st.floats(0.05, 0.9), st.booleans())
def test_without_a_loss_the_target_share_is_zero_in_time(
    shape: tuple[int, int], block: tuple[int, int], seed: int, target: float, together: bool
) -> None:
    layers = {"a": nn.Linear(shape[1], shape[0]), "b": nn.Linear(4, 6)}
    layers["a"].weight.data, layers["b"].weight.data = weight_of(shape, seed), 3 * weight_of((6, 4), seed + 1)
    nothing = dict.fromkeys(layers)
    num_steps = 40
    objective = lasso(layers, penalty_of(block, "rows", strengths=nothing, target=target, together=together, reweight=1.0))
    for step in range(num_steps):
        objective(nn.Identity(), batch_of(step, num_steps))
    norms = [group_norms(layer.weight.detach(), pieces(Blocks(*block), "rows")[0]).flatten() for layer in layers.values()]
    for values in [torch.cat(norms)] if together else norms:
        gone = max(1, math.ceil(target * len(values) - 1e-9))
        assert int((values <= 1e-5).sum()) == gone, values


def test_what_the_loss_holds_raises_lambda() -> None:
    """A loss that puts the weights back after every step: lambda grows as the steps run out, and nothing is left to it afterwards."""
    layer, seen = nn.Linear(8, 8), []
    start = layer.weight.detach().clone()
    objective = lasso({"a": layer}, penalty_of((2, 2), "rows", strengths={"a": None}))
    for step in range(20):
        norms, betas = [group_norms(layer.weight.detach(), Blocks(1, 2))], [objective.beta_0_0]
        seen += objective.lambdas(norms, betas, step, 20)
        objective(nn.Identity(), batch_of(step, 20))
        layer.weight.data.copy_(start)
    assert all(after > before > 0 for before, after in pairwise(seen[:18]))
    assert seen[18:] == [0, 0]


def test_one_step_of_the_optimizer_is_one_of_the_penalty() -> None:
    layer = nn.Linear(4, 4)
    objective = lasso({"a": layer}, penalty_of((2, 2), "rows", strengths={"a": 0.5}))
    before = layer.weight.detach().clone()
    objective(nn.Identity(), batch_of(0))
    assert torch.equal(layer.weight, before)  # no step of the optimizer came before
    objective(nn.Identity(), batch_of(1))
    after = layer.weight.detach().clone()
    assert not torch.equal(after, before)
    objective(nn.Identity(), batch_of(1))  # another micro-batch
    assert torch.equal(layer.weight, after)


def test_a_group_that_is_zero_stays_a_number() -> None:
    layer = nn.Linear(5, 3)
    layer.weight.data.zero_()
    lasso({"a": layer}, penalty_of((2, 2), "both", strengths={"a": None}))(nn.Identity(), batch_of(1))
    assert layer.weight.tolist() == torch.zeros(3, 5).tolist()


@pytest.mark.parametrize(
    ("reweight", "num_steps", "times"), [(0.25, 10, 4), (0.25, 8, 4), (0.1, 30, 10), (0.3, 9, 3), (0.34, 100, 3), (1.0, 7, 1), (0.01, 5, 5)]
)
def test_groups_are_weighed_again_at_equal_distances(reweight: float, num_steps: int, times: int) -> None:
    layer = nn.Linear(4, 4)
    objective: Any = lasso({"a": layer}, penalty_of((2, 2), "rows", strengths={"a": 0.0}, reweight=reweight))
    weighed = [0]  # when it was made
    for step in range(num_steps):
        layer.weight.data *= 0.9
        before, now = objective.beta_0_0.clone(), beta(group_norms(layer.weight.detach(), Blocks(1, 2)))
        objective(nn.Identity(), batch_of(step, num_steps))
        if not torch.equal(before, objective.beta_0_0):
            weighed.append(step)
            assert torch.equal(objective.beta_0_0, now)
    assert len(weighed) == times
    assert weighed == list(range(0, num_steps, weighed[1] if len(weighed) > 1 else num_steps))
    assert list(objective.state_dict()) == ["beta_0_0"]  # what a resumed training goes on with; the layers are saved with the model
    assert not list(objective.parameters())


@given(SHAPES, SHAPES, BLOCKS, st.integers(0, 99), st.sampled_from(["rows", "columns", "both"]), st.floats(0, 0.95))
def test_the_smallest_groups_of_all_layers_go(
    one: tuple[int, int], other: tuple[int, int], block: tuple[int, int], seed: int, groups: Groups, sparsity: float
) -> None:
    weights = {"a": weight_of(one, seed), "b": 2 * weight_of(other, seed + 1)}
    masks = model_masks(weights, pieces(Blocks(*block), groups), sparsity)
    sizes, stays = [], []
    for name, weight in weights.items():
        least = torch.full(weight.shape, math.inf, dtype=torch.float64)
        for places, values in groups_of(weight, block, groups):
            for place in places:
                least[place] = min(float(least[place]), float(values.double().square().mean().sqrt()))
        assert bool(masks[name].any())
        sizes += least.flatten().tolist()
        stays += masks[name].flatten().tolist()
    gone = stays.count(False)
    assert gone <= sparsity * len(sizes) + 1e-6
    largest_gone = max((size for size, kept in zip(sizes, stays, strict=True) if not kept), default=0.0)
    smaller_kept = [size for size, kept in zip(sizes, stays, strict=True) if kept and size < largest_gone - 1e-12]
    assert len(set(smaller_kept)) <= len(weights)  # only the largest group of a layer may stay although it is small


@given(SHAPES, BLOCKS, st.integers(0, 99), st.floats(0, 0.95))
def test_the_smallest_groups_of_both_kinds_go(shape: tuple[int, int], block: tuple[int, int], seed: int, sparsity: float) -> None:
    weight = weight_of(shape, seed)
    found = sorted(groups_of(weight, block, "both"), key=lambda group: float(group[1].double().square().mean()))
    asked, masks = math.ceil(sparsity * weight.numel() - 1e-9), [torch.ones(shape, dtype=torch.bool)]
    for places, _ in found:
        masks.append(masks[-1].clone())
        for place in places:
            masks[-1][place] = False
    expected = min((one for one in masks if bool(one.any())), key=lambda one: (abs(int((~one).sum()) - asked), int(one.sum())))
    assert torch.equal(layer_mask(weight, pieces(Blocks(*block), "both"), sparsity), expected)


@given(SHAPES, BLOCKS, st.integers(0, 99), st.sampled_from(["rows", "columns"]), st.floats(0, 0.999))
def test_the_smallest_groups_of_each_size_go(
    shape: tuple[int, int], block: tuple[int, int], seed: int, groups: Groups, share: float
) -> None:
    weight, (piece,) = weight_of(shape, seed), pieces(Blocks(*block), groups)
    kept = layer_mask(weight, (piece,), share)
    assert int((~kept).sum()) == reachable(shape, piece, share) < weight.numel()
    sizes: dict[int, list[tuple[float, bool]]] = {}
    for places, values in groups_of(weight, block, groups):
        stays = [bool(kept[place]) for place in places]
        assert len(set(stays)) == 1
        sizes.setdefault(len(places), []).append((float(values.double().square().mean()), stays[0]))
    for found in sizes.values():
        gone, stay = ([value for value, stays in found if stays is which] for which in (False, True))
        assert not gone or not stay or max(gone) < min(stay)


@given(SHAPES, BLOCKS, st.integers(0, 99), st.sampled_from(["rows", "columns"]), st.floats(0, 0.95))
def test_balanced_each_block_loses_the_same_share(
    shape: tuple[int, int], block: tuple[int, int], seed: int, groups: Groups, sparsity: float
) -> None:
    weight = weight_of(shape, seed)
    found = balanced_mask(weight, Blocks(*block), groups, sparsity)
    for top in range(0, shape[0], block[0]):
        for left in range(0, shape[1], block[1]):
            part, kept = (values[top : top + block[0], left : left + block[1]] for values in (weight, found))
            part, kept = (part, kept) if groups == "rows" else (part.T, kept.T)
            gone = max(0, min(math.floor(sparsity * len(part) + 0.5), len(part) - 1))
            norms = part.norm(dim=1)
            expected = norms.argsort()[gone:].sort().values
            assert kept.all(dim=1).nonzero().flatten().tolist() == expected.tolist()
            assert not kept[[row for row in range(len(part)) if row not in expected.tolist()]].any()
    share = balanced_share(shape, Blocks(*block), groups, sparsity)
    assert float((~found).double().mean()) == pytest.approx(share)
    assert share < 1


def test_ragged_groups_are_compared_by_root_mean_squares() -> None:
    weight = torch.full((4, 5), 1.0)
    weight[:, 4] = 1.1  # alone in the last block: their norms are the smaller ones
    assert float(group_norms(weight, Blocks(1, 4))[0, 1]) < float(group_norms(weight, Blocks(1, 4))[0, 0])
    assert layer_mask(weight, pieces(Blocks(1, 4), "rows"), 0.2).tolist() == [[True] * 5] * 3 + [[False] * 4 + [True]]


def test_a_last_block_of_one_row_does_not_always_go() -> None:
    weight = weight_of((5, 6), 0)
    found = balanced_mask(weight, Blocks(4, 6), "rows", 0.5)
    assert (~found).all(dim=1).tolist().count(True) == 2
    assert bool(found[4].all())
    assert bool(balanced_mask(weight, Blocks(1, 6), "rows", 0.5).all())


def test_strengths_by_patterns_and_quantiles() -> None:
    names = ["layer.0.query", "layer.0.key", "layer.1.query"]
    assert strengths(names, 0.1, {"*.query": 0.2, "layer.1.*": 0.3}) == {names[0]: 0.2, names[1]: 0.1, names[2]: 0.3}
    weight = torch.arange(1.0, 7.0)[:, None].expand(6, 4).contiguous()
    (found,) = quantiles({"a": weight}, pieces(Blocks(1, 4), "rows")).values()
    assert len(found) == len(QUANTILES)
    assert (found[0], found[-1]) == (1, 6)
    assert found == sorted(found)


@given(SHAPES, BLOCKS, st.integers(0, 99), st.floats(0.01, 3))
def test_in_the_metric_of_the_loss_norms_are_those_of_the_product(
    shape: tuple[int, int], block: tuple[int, int], seed: int, strength: float
) -> None:
    """Written out, with what was measured at the start; what is measured at a later step counts from there on."""
    layer = nn.Linear(shape[1], shape[0])
    layer.weight.data = weight_of(shape, seed)
    sides = [[weight_of((1, length), seed + k)[0].abs() + 0.1 for length in shape] for k in (1, 2)]
    measured = [Curvature(*side) for side in sides]
    left = iter(measured)
    penalty = penalty_of(block, "rows", strengths={"a": strength}, reweight=0.5, measure=lambda model: {"a": next(left)})
    objective = lasso({"a": layer}, penalty)
    for step, factors in ((1, measured[0]), (2, measured[1]), (3, measured[1])):
        before = layer.weight.detach().clone()
        if step != 3:  # of four steps the first and the third begin with what is measured anew; the first is that of the start
            product = factors.outputs_O[:, None] * before * factors.inputs_I
            scale = float(before.norm() / product.norm())
            betas = [1 / (scale * float(values.norm()) + EPSILON) for _, values in groups_of(product, block, "rows")]
        product = scale * factors.outputs_O[:, None] * before * factors.inputs_I
        expected = before.clone()
        for (places, values), beta_g in zip(groups_of(product, block, "rows"), betas, strict=True):
            for place in places:
                expected[place] *= max(0.0, 1 - 0.1 * strength * beta_g / max(float(values.norm()), 1e-30))
        objective(nn.Identity(), batch_of(step, 4))
        torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-3, atol=1e-5)
    assert list(objective.state_dict()) == ["outputs_0", "inputs_0", "beta_0_0"]
