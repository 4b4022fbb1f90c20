"""The search for a latency budget on made-up engines, and what a target means in the units of the table. No clock is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.models.architecture.structure import Sizes
from prune.latency.budget import MAX_ROUNDS, TOLERANCE, LatencyBudget, search_budget
from prune.latency.table import Curve, LatencyTable
from tests.told import Told


@given(st.floats(0.5, 2.0), st.floats(0.0, 2.0), st.floats(0.3, 0.9), st.floats(0.0, 0.3))
def test_the_search_finds_what_an_engine_takes_that_the_table_is_wrong_about(scale: float, rest: float, share: float, bend: float) -> None:
    def engine(ms: float) -> float:
        return scale * (ms - bend * ms * (rest + 10 - ms) / (rest + 10))

    asked = engine(rest + share * 10)
    kept, number = search_budget(lambda ms: ms, lambda ms: ms, engine, asked, rest + 5)
    assert number < MAX_ROUNDS
    assert (1 - 1.5 * TOLERANCE) * asked <= engine(kept) <= asked


@given(st.lists(st.floats(0.2, 3.0), min_size=MAX_ROUNDS, max_size=MAX_ROUNDS))
def test_of_all_rounds_the_slowest_that_fits_is_kept_else_the_fastest(measured: list[float]) -> None:
    """Against a naive rule, on an engine whose noise hides what the table says."""
    seen: list[float] = []

    def measure(_: float) -> float:
        seen.append(measured[len(seen)])
        return seen[-1]

    number = search_budget(lambda ms: ms + len(seen), lambda ms: ms, measure, 1.0, 1.0)[1]
    fitting = [value for value in seen if value <= 1.0]
    assert seen[number] == (max(fitting) if fitting else min(seen))
    done = [1 - TOLERANCE <= value <= 1.0 for value in seen]
    assert not any(done[:-1])
    assert done[-1] or len(seen) == MAX_ROUNDS


def test_a_shape_slightly_over_the_target_does_not_end_the_search() -> None:
    """Asked for 10.0 ms: 10.2 ms are near, but over."""
    engine = {10.0: 10.2}
    kept, number = search_budget(lambda ms: ms, lambda ms: ms, lambda ms: engine.get(ms, ms * 1.02), 10.0, 10.0)
    assert number == 1
    assert 9.7 <= kept * 1.02 <= 10.0


@pytest.mark.parametrize(("takes", "warned"), [(1.5, True), (1.0, False)])
def test_the_stage_warns_where_no_shape_fits(takes: float, warned: bool) -> None:
    """An engine that takes the same time whatever is removed."""
    told = Told()

    class Engine:
        label, context = "engine", SimpleNamespace(progress=told)

        def of(self, configs: list[Any]) -> list[float]:
            return [3.0, takes]

    class Fits(LatencyBudget):
        def measure(self, kept: Any, model: Any, sizes: Any, key: str) -> float:
            self.figures["rounds"].append({"measured_ms": takes})
            return takes

    table = LatencyTable(0.5, 0.1, Curve((1, 2), (0.0, 0.3)), Curve((4, 24), (0.0, 1.0)))
    sizes = Sizes(8, 4, 4, (2,), (2,), (0.5,), (24,), (0,))
    kept = SimpleNamespace(sizes=lambda sizes: sizes)
    budget = Fits(Engine(), table, None, 3.0, 3.0, 1.0, False, {"rounds": []})  # type: ignore[arg-type]
    budget.fit(lambda ms: kept, None, sizes, 0.5, 0.1, 1.4, "stages.prune")  # type: ignore[arg-type,return-value]
    assert bool(told.warnings) == warned
    if warned:
        assert told.warnings == [
            "stages.prune: none of the 1 shapes that were measured is fast enough; the fastest is kept (1.5 ms measured, 1 ms asked for)"
        ]


def test_a_choice_is_measured_once() -> None:
    calls: list[float] = []
    assert search_budget(lambda ms: 1.0, lambda ms: ms, lambda ms: calls.append(ms) or 1.5, 1.0, 1.0) == (1.0, 0)  # type: ignore[func-returns-value]
    assert calls == [1.0]


@given(st.floats(0.2, 5.0), st.floats(0.5, 1.0))
def test_what_is_asked_for_is_read_in_the_units_of_the_table(error: float, share: float) -> None:
    """The table says 3.5 ms for a model that takes `error` times as long."""
    table, nothing = LatencyTable(0.5, 0.1, Curve((1, 2, 4), (0.0, 0.3, 0.4)), Curve((4, 24), (0.0, 1.0))), Any
    budget = LatencyBudget(nothing, table, nothing, 3.5 * error, 3.5 * error, share * 3.5 * error, False, {})  # type: ignore[arg-type]
    assert budget.sparsity(0.9, 3.0, 0.1, "stages.prune.latency_ms") == pytest.approx(1 - (share * 3.5 - 0.5) / 3.0)
