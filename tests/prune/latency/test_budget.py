"""The search for a latency budget on made-up engines, and what a target means in the units of the table. No clock is read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prune.latency.budget import MAX_ROUNDS, LatencyBudget, search_budget
from prune.latency.table import Curve, LatencyTable


@given(st.floats(0.5, 2.0), st.floats(0.0, 2.0), st.floats(0.3, 0.9), st.floats(0.0, 0.3))
def test_the_search_finds_what_an_engine_takes_that_the_table_is_wrong_about(scale: float, rest: float, share: float, bend: float) -> None:
    def engine(ms: float) -> float:
        return scale * (ms - bend * ms * (rest + 10 - ms) / (rest + 10))

    asked = engine(rest + share * 10)
    kept, number = search_budget(lambda ms: ms, lambda ms: ms, engine, asked, rest + 5)
    assert number < MAX_ROUNDS
    assert engine(kept) == pytest.approx(asked, rel=0.05)


def test_of_rounds_that_miss_the_nearest_is_kept() -> None:
    measured = iter((2.0, 1.2, 0.5, 0.7))
    assert search_budget(lambda ms: ms, lambda ms: ms, lambda ms: next(measured), 1.0, 1.0)[1] == 1


def test_a_choice_is_measured_once() -> None:
    calls: list[float] = []
    assert search_budget(lambda ms: 1.0, lambda ms: ms, lambda ms: calls.append(ms) or 1.5, 1.0, 1.0) == (1.0, 0)  # type: ignore[func-returns-value]
    assert calls == [1.0]


@given(st.floats(0.2, 5.0), st.floats(0.5, 1.0))
def test_what_is_asked_for_is_read_in_the_units_of_the_table(error: float, share: float) -> None:
    """The table says 3.5 ms for a model that takes `error` times as long."""
    table, nothing = LatencyTable(0.5, 0.1, Curve((1, 2, 4), (0.0, 0.3, 0.4)), Curve((4, 24), (0.0, 1.0))), Any
    budget = LatencyBudget(nothing, table, nothing, 3.5 * error, share * 3.5 * error, False, {})  # type: ignore[arg-type]
    assert budget.sparsity(0.9, 3.0, 0.1, "stages.prune.latency_ms") == pytest.approx(1 - (share * 3.5 - 0.5) / 3.0)
