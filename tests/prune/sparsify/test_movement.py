"""Movement: gradients against finite differences, the schedule, and what becomes of layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.training.optimizers import parameter_groups
from foundation.training.train import Batch
from prune.sparsify.movement import Movable, Movement, ScoredLinear, extract, insert, rising, scored_layers
from prune.sparsify.patterns import Blocks, Unstructured, highest_blocks, mask, num_zeros, spread

PATTERNS: tuple[Movable, ...] = (Unstructured(), Blocks(2, 3))


def layer_of(seed: int, pattern: Movable, outputs: int = 5, inputs: int = 7) -> ScoredLinear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = ScoredLinear(nn.Linear(inputs, outputs).double(), pattern)
        layer.scores.data = torch.randn(layer.scores.shape, dtype=torch.float64)
    return layer


@given(st.integers(0, 99), st.sampled_from(PATTERNS), st.sampled_from([0.0, 0.4, 0.8]))
def test_gradients_are_those_of_the_surrogate(seed: int, pattern: Movable, sparsity: float) -> None:
    """Straight through: the loss as a function of W and of S has the gradients of L(W * (M + S - S_0)), with M as it was chosen."""
    layer = layer_of(seed, pattern)
    layer.choose(sparsity)
    generator = torch.Generator().manual_seed(seed + 1)
    x, target = (torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (7, 5))
    (layer(x) - target).pow(2).sum().backward()
    start, kept = layer.scores.detach().clone(), layer.kept_OI.double()

    def surrogate(weight: Tensor, scores: Tensor) -> float:
        moved = (scores - start).reshape(layer.grid)
        whole = moved if isinstance(pattern, Unstructured) else spread(moved, weight.shape, pattern)
        return float((x @ (weight * (kept + whole)).T + layer.bias.detach() - target).pow(2).sum())

    for given_to, values in ((0, layer.weight), (1, layer.scores)):
        assert values.grad is not None
        for place in np.ndindex(*values.shape):
            change = torch.zeros_like(values.detach())
            change[place] = 1e-4
            plus, minus = (
                surrogate(*(one + sign * change if which == given_to else one for which, one in enumerate((layer.weight.detach(), start))))
                for sign in (1, -1)
            )
            assert float(values.grad[place]) == pytest.approx((plus - minus) / 2e-4, rel=1e-5, abs=1e-6)


@given(st.integers(0, 99), st.sampled_from(PATTERNS), st.floats(0, 0.95))
def test_the_highest_scores_stay(seed: int, pattern: Movable, sparsity: float) -> None:
    layer = layer_of(seed, pattern)
    layer.choose(sparsity)
    scores = layer.scores.detach().reshape(layer.grid)
    if isinstance(pattern, Unstructured):
        if layer.kept_OI.any() and not layer.kept_OI.all():
            assert float(scores[layer.kept_OI].min()) > float(scores[~layer.kept_OI].max())
        assert int((~layer.kept_OI).sum()) >= min(sparsity * 35 - 1e-6, 34)
        assert torch.equal(layer.kept_OI, mask(scores, pattern, sparsity))
    else:
        zeros = num_zeros(sparsity, 35)
        assert abs(int((~layer.kept_OI).sum()) - zeros) <= 1  # of 6, 2, 3 and 1 weights
        assert torch.equal(layer.kept_OI, spread(highest_blocks(scores, (5, 7), pattern, zeros), (5, 7), pattern))


def test_scores_have_no_weight_decay() -> None:
    for pattern in PATTERNS:
        layer = layer_of(0, pattern)
        decayed, free = sorted(parameter_groups(layer, 0.1), key=lambda group: -group["weight_decay"])
        assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0)
        assert any(layer.scores is parameter for parameter in free["params"])
        assert [parameter is layer.weight for parameter in decayed["params"]] == [True]


def test_weights_that_move_to_zero_go() -> None:
    layer = layer_of(0, Unstructured())
    layer.scores.data.zero_()
    optimizer = torch.optim.AdamW([layer.weight, layer.scores], lr=0.01, weight_decay=0)
    target = layer.weight.detach() * torch.where(torch.arange(35).reshape(5, 7) % 2 == 0, 0.1, 2.0)  # half of them shrink, half grow
    for step in range(30):
        layer.choose(0.5 * step / 30)
        optimizer.zero_grad()
        layer(torch.eye(7, dtype=torch.float64)).sub(layer.bias).T.sub(target).pow(2).sum().backward()
        optimizer.step()
    layer.choose(0.5)
    assert torch.equal(layer.kept_OI.flatten(), torch.arange(35) % 2 == 1)


def test_the_schedule_is_that_of_zhu_and_gupta() -> None:
    shares = [rising(step, 100, 0.1, 0.3) for step in range(100)]
    assert shares[:11] == [0.0] * 11
    assert shares[70:] == [1.0] * 30
    assert shares[40] == pytest.approx(1 - 0.5**3)
    assert shares == sorted(shares)
    assert [rising(step, 3, 0, 0) for step in range(3)] == pytest.approx([0, 1 - (2 / 3) ** 3, 1 - (1 / 3) ** 3])


def test_masks_follow_the_steps_and_the_layers_come_back() -> None:
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    names = ["0", "2"]
    insert(model, names, Unstructured())
    assert list(scored_layers(model)) == names
    generator = torch.Generator().manual_seed(0)
    for layer in scored_layers(model).values():
        layer.scores.data = torch.randn(layer.scores.shape, generator=generator)
    calls: list[int] = []

    def task(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        calls.append(batch.step)
        return {"loss": module(batch.features["x"]).sum(dim=1)}

    objective, x = Movement(task, 0.5, 0.1, 0.3), {"x": torch.randn(3, 6, generator=generator)}
    seen = {}
    for step in (0, 4, 9):
        objective(model, Batch(x, torch.zeros(3), np.arange(3), step, 10))
        seen[step] = [float((~layer.kept_OI).float().mean()) for layer in scored_layers(model).values()]
    assert seen[0] == [0, 0]
    assert 0 < seen[4][0] < 0.5
    assert seen[9] == [0.5, 0.5]
    assert not any("kept" in name for name in model.state_dict())
    answers = model(x["x"])
    kept = [layer.kept_OI for layer in scored_layers(model).values()]
    extract(model, 0.5)
    assert [type(model[int(name)]) for name in names] == [nn.Linear, nn.Linear]
    assert [torch.equal(model[int(name)].weight != 0, mask_OI) for name, mask_OI in zip(names, kept, strict=True)] == [True, True]
    torch.testing.assert_close(model(x["x"]), answers)
