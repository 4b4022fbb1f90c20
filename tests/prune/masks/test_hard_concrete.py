"""Hard concrete gates against their formulas, against many draws, and at their ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prune.masks.hard_concrete import BETA, BOUND, GAMMA, OPEN, ZETA, draw, fixed, present

DRAWS = 20_000


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("log_alpha", [-3.0, -0.5, 0.0, 1.0, 2.5])
def test_draws_have_the_distribution_of_the_formula(log_alpha: float) -> None:
    torch.manual_seed(1)
    z = draw(torch.full((DRAWS,), log_alpha))
    assert (z.min() >= 0) & (z.max() <= 1)
    above_0 = sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))
    at_1 = sigmoid(log_alpha - BETA * math.log((1 - GAMMA) / (ZETA - 1)))
    assert float((z > 0).float().mean()) == pytest.approx(above_0, abs=0.012)
    assert float((z == 1).float().mean()) == pytest.approx(at_1, abs=0.012)
    assert float(present(torch.tensor(log_alpha))) == pytest.approx(above_0, rel=1e-5)
    # P(z <= x) of the stretched concrete distribution, at a point inside
    x = (0.3 - GAMMA) / (ZETA - GAMMA)
    below = sigmoid(BETA * (math.log(x) - math.log(1 - x)) - log_alpha)
    assert float((z <= 0.3).float().mean()) == pytest.approx(below, abs=0.012)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=5))
def test_gates_without_noise_are_the_formula(values: list[float]) -> None:
    expected = [min(1.0, max(0.0, sigmoid(value) * (ZETA - GAMMA) + GAMMA)) for value in values]
    torch.testing.assert_close(fixed(torch.tensor(values)), torch.tensor(expected), atol=1e-6, rtol=1e-5)


def test_gates_begin_open_and_can_always_come_back() -> None:
    assert float(fixed(torch.tensor(OPEN))) == 1
    assert float(present(torch.tensor(OPEN))) > 0.98
    assert 0 < float(present(torch.tensor(-BOUND))) < 0.06


def test_a_draw_has_the_gradient_of_its_noise() -> None:
    log_alpha = torch.zeros(2000, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    draw(log_alpha).sum().backward()
    found, step = log_alpha.grad, 1e-5
    torch.manual_seed(3)
    higher = draw(torch.full((2000,), step, dtype=torch.float64))
    torch.manual_seed(3)
    lower = draw(torch.full((2000,), -step, dtype=torch.float64))
    expected = (higher - lower) / (2 * step)
    inside = (higher > 0) & (higher < 1) & (lower > 0) & (lower < 1)
    assert found is not None
    torch.testing.assert_close(found[inside], expected[inside], atol=1e-6, rtol=1e-4)
    assert inside.sum() > 500
    assert (found[~inside] == 0).sum() > 500
