"""Group lasso: the penalty against loops, its gradient, reweighting, and which groups go."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from compress.training.train import Batch
from prune.sparsify.lasso import (
    EPSILON,
    QUANTILES,
    Groups,
    Lasso,
    balanced_mask,
    balanced_share,
    beta,
    group_norms,
    layer_mask,
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


@given(SHAPES, BLOCKS, st.integers(0, 99), st.sampled_from(["rows", "columns", "both"]))
def test_the_penalty_is_that_of_the_loop(shape: tuple[int, int], block: tuple[int, int], seed: int, groups: Groups) -> None:
    layers = {"a": nn.Linear(shape[1], shape[0]), "b": nn.Linear(2, 3)}
    layers["a"].weight.data, layers["b"].weight.data = weight_of(shape, seed), weight_of((3, 2), seed + 1)
    lambdas = {"a": 0.3, "b": 0.7}
    objective = Lasso(task, layers, lambdas, pieces(Blocks(*block), groups), 0.25)
    expected = 0.0
    for name, layer in layers.items():
        for _, values in groups_of(layer.weight.detach(), block, groups):
            norm = math.sqrt(sum(float(value) ** 2 for value in values))
            expected += lambdas[name] * norm / (norm + EPSILON)
    parts = objective(nn.Identity(), batch_of(0))
    assert parts["loss"].tolist() == [1, 1, 1]
    assert parts["lasso"].tolist() == pytest.approx([expected] * 3, rel=1e-4)
    parts["lasso"].mean().backward()
    for name, layer in layers.items():
        gradient = torch.zeros_like(layer.weight)
        for places, values in groups_of(layer.weight.detach(), block, groups):
            norm = float(values.norm())
            for place, value in zip(places, values, strict=True):
                gradient[place] += lambdas[name] * float(value) / norm / (norm + EPSILON)
        assert layer.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad, gradient, rtol=1e-3, atol=1e-5)


def test_a_group_that_is_zero_has_no_gradient() -> None:
    layer = nn.Linear(5, 3)
    layer.weight.data.zero_()
    Lasso(task, {"a": layer}, {"a": 1.0}, pieces(Blocks(2, 2), "both"), 1.0)(nn.Identity(), batch_of(1))["lasso"].sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == torch.zeros(3, 5).tolist()


def test_groups_are_weighed_again_at_equal_distances() -> None:
    layer = nn.Linear(4, 4)
    objective: Any = Lasso(task, {"a": layer}, {"a": 1.0}, pieces(Blocks(2, 2), "rows"), 0.5)
    changed = []
    for step in range(8):
        layer.weight.data *= 0.5
        before = objective.beta_0_0.clone()
        objective(nn.Identity(), batch_of(step))
        changed.append(not torch.equal(before, objective.beta_0_0))
        if changed[-1]:
            assert torch.equal(objective.beta_0_0, beta(layer.weight.detach(), Blocks(1, 2)))
    assert changed == [True, False, False, False, True, False, False, False]
    assert list(objective.state_dict()) == ["beta_0_0"]  # what a resumed training goes on with; the layers are saved with the model
    assert not list(objective.parameters())


@pytest.mark.parametrize(
    ("reweight", "num_steps", "times"), [(0.25, 10, 4), (0.25, 8, 4), (0.1, 30, 10), (0.3, 9, 3), (0.34, 100, 3), (1.0, 7, 1), (0.01, 5, 5)]
)
def test_groups_are_weighed_no_more_often_than_asked(reweight: float, num_steps: int, times: int) -> None:
    layer = nn.Linear(4, 4)
    objective: Any = Lasso(task, {"a": layer}, {"a": 1.0}, pieces(Blocks(2, 2), "rows"), reweight)
    weighed = []
    for step in range(num_steps):
        layer.weight.data *= 0.9
        before = objective.beta_0_0.clone()
        objective(nn.Identity(), batch_of(step, num_steps))
        weighed += [step] if not torch.equal(before, objective.beta_0_0) else []
    assert len(weighed) == times
    assert weighed == list(range(0, num_steps, weighed[1] if len(weighed) > 1 else num_steps))


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
    layer = nn.Linear(4, 6)
    layer.weight.data = torch.arange(1.0, 7.0)[:, None].expand(6, 4).contiguous()
    (found,) = quantiles({"a": layer}, pieces(Blocks(1, 4), "rows")).values()
    assert len(found) == len(QUANTILES)
    assert (found[0], found[-1]) == (1, 6)
    assert found == sorted(found)
