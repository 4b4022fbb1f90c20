"""The price of cost while masks are learned: its formula written out with plain numbers, and what it must not depend on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prune.masks.price import DECAY, INTEGRAL, PROPORTIONAL, STEEPEST, Price

SMALL = st.floats(-0.02, 0.02)
NUMBERS = st.lists(st.floats(0.01, 10), min_size=3, max_size=3)


@given(st.lists(st.tuples(SMALL, NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_the_price_is_that_of_the_formula(steps: list[tuple[float, list[float], list[float]]]) -> None:
    price, paid, bought, raised = Price(3), 0.0, 0.0, 0.0
    before: tuple[list[float], list[float]] = ([0.0] * 3, [0.0] * 3)
    for number, (gap, gradient, slope) in enumerate(steps):
        found = price.update(number, gap, torch.tensor(slope))
        paid = DECAY * paid + (1 - DECAY) * sum(abs(g * s) for g, s in zip(*before, strict=True))
        bought = DECAY * bought + (1 - DECAY) * sum(s * s for s in before[1])
        raised -= INTEGRAL * gap
        assert found == pytest.approx(paid / bought * math.sinh(raised - PROPORTIONAL * gap) if bought else 0.0, rel=1e-3, abs=1e-6)
        price.add_gradient(torch.tensor(gradient) / 4)  # two micro-batches
        price.add_gradient(torch.tensor(gradient) * 3 / 4)
        before = (gradient, slope)


def played(price: Price, size: float = 1.0, gap: float = -0.1) -> float:
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        price.update(step, gap, torch.rand(5, generator=generator))
        price.add_gradient(size * torch.randn(5, generator=generator))
    return price.update(20, gap, torch.ones(5))


def test_it_grows_with_the_loss_and_with_what_is_missing() -> None:
    assert played(Price(5), 1000.0) == pytest.approx(1000 * played(Price(5)), rel=1e-4)
    values = [played(Price(5), gap=gap) for gap in (0.1, 0.01, 0.0, -0.01, -0.1)]
    assert values == sorted(values)
    assert values[0] < 0 < values[-1]
    assert played(Price(5), gap=-100.0) == pytest.approx(
        played(Price(5), gap=-0.01) * math.sinh(STEEPEST) / math.sinh(0.01 * (PROPORTIONAL + 21 * INTEGRAL)), rel=1e-3
    )


def test_a_step_has_one_price_and_a_saved_one_goes_on() -> None:
    price, again = Price(5), Price(5)
    first = played(price)
    assert price.update(20, 0.5, torch.zeros(5)) == first
    again.load_state_dict(price.state_dict())
    for each in (price, again):
        each.add_gradient(torch.ones(5))
    assert again.update(21, -0.2, torch.ones(5)) == price.update(21, -0.2, torch.ones(5)) > 0


def test_before_anything_was_seen_nothing_is_paid() -> None:
    assert Price(5).update(0, -0.5, torch.ones(5)) == 0.0


def test_what_goes_on_missing_is_paid_more_and_more_for() -> None:
    price = Price(1)
    found = []
    for step in range(400):
        found.append(price.update(step, -0.005, torch.ones(1)))
        price.add_gradient(torch.ones(1))
    assert found[100] < found[200] / 1.2 < found[399] / 1.4
    for step in range(400, 500):
        found.append(price.update(step, 0.1, torch.ones(1)))
        price.add_gradient(torch.ones(1))
    assert found[-1] < found[400] < 0
    assert float(price.raised) > -STEEPEST
