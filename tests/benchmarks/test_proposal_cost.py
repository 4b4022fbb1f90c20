"""When proposed tokens pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.decoding.proposal_cost import break_even


@given(st.integers(1, 8), st.floats(1.0, 9.0))
def test_at_the_least_acceptance_a_step_gives_as_many_tokens_as_it_costs(count: int, cost: float) -> None:
    least = break_even(count, cost)
    if least is None:
        assert cost > count + 1
        return
    tokens = 1.0 + sum(least**accepted for accepted in range(1, count + 1))  # one of the model, and each that was accepted up to there
    assert tokens == pytest.approx(cost, abs=1e-4)
    assert 0 <= least <= 1


def test_free_proposals_always_pay_and_dear_ones_never() -> None:
    assert break_even(3, 1.0) == pytest.approx(0, abs=1e-5)
    assert break_even(3, 4.0) == pytest.approx(1, abs=1e-5)
    assert break_even(3, 4.1) is None
