"""The choice of sites on made-up costs."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from foundation.measure.closeness import ADDED_SHARE
from quantize.site_choice import passes, sensitivities, switch_on


class Costs:
    """A distance, the same for all rows, that is the sum of the costs of the sites, and counts how often it is asked for."""

    def __init__(self, layers: float, **sites: float) -> None:
        self.layers, self.sites, self.asked = layers, sites, 0

    def __call__(self, names: Collection[str]) -> np.ndarray:
        self.asked += 1
        return np.full(4, self.layers + sum(self.sites[name] for name in names))


def test_a_site_that_costs_too_much_is_off_and_the_others_are_on() -> None:
    costs = Costs(0.4, a=0.02, bad=0.3, b=0.03, c=-0.01)
    choice = switch_on(["a", "bad", "b", "c"], [], costs, floor=1e-4)
    assert choice.on == ("a", "b", "c")
    assert choice.added == pytest.approx({"a": 0.02, "bad": 0.3, "b": 0.03, "c": -0.01})
    assert (choice.layers, choice.before, choice.bound) == pytest.approx((0.4, 0.4, 0.1))
    assert choice.after == pytest.approx(0.44)
    assert costs.asked <= passes(["a", "bad", "b", "c"], [])


def test_what_is_on_in_any_case_stays_on_and_the_bound_counts_from_there() -> None:
    costs = Costs(0.4, a=0.05, bad=0.3, b=0.04)
    choice = switch_on(["a", "bad", "b"], ["bad"], costs, floor=0.0)
    assert choice.on == ("a", "bad", "b")
    assert (choice.before, choice.after) == pytest.approx((0.7, 0.79))
    assert costs.asked <= passes(["a", "bad", "b"], ["bad"])


def test_many_small_costs_together_are_bounded() -> None:
    choice = switch_on([f"s{i}" for i in range(10)], [], Costs(0.4, **{f"s{i}": 0.03 for i in range(10)}), floor=0.0)
    assert len(choice.on) == 3  # each of them alone is far below the bound of 0.1


def test_next_to_no_distance_there_is_a_floor() -> None:
    costs = Costs(0.0, a=5e-5, b=4e-5, c=3e-5)
    assert switch_on(["a", "b", "c"], [], costs, floor=1e-4).on == ("b", "c")
    assert switch_on(["a", "b", "c"], [], costs, floor=0.0).on == ()


def test_costs_that_only_show_together_are_seen() -> None:
    def distances(names: Collection[str]) -> np.ndarray:
        return np.full(3, 0.4 + (1.0 if {"a", "b"} <= set(names) else 0.0))

    assert switch_on(["a", "b"], [], distances, floor=0.0).on == ("a",)


@given(st.integers(0, 2**31), st.floats(0, 0.2), st.floats(0.01, 0.5), st.integers(2, 30))
def test_a_site_is_on_only_if_the_rows_can_tell_that_it_stays_within_the_bound(seed: int, cost: float, noise: float, rows: int) -> None:
    """Against the t interval of the differences row by row."""
    random = np.random.default_rng(seed)
    layers_n, added_n = random.random(rows), cost + noise * random.standard_normal(rows)
    choice = switch_on(["a"], [], lambda names: layers_n + (added_n if names else 0), floor=0.0)
    low, high = stats.t.interval(0.95, rows - 1, loc=added_n.mean(), scale=added_n.std(ddof=1) / np.sqrt(rows))
    assert choice.on == (("a",) if high <= layers_n.mean() / 4 else ())
    assert choice.interval == (pytest.approx((low, high)) if choice.on else (0, 0))


def test_one_row_tells_nothing() -> None:
    assert switch_on(["a"], [], lambda names: np.full(1, 0.4), floor=1.0).on == ()


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(-1, 1), min_size=1),
    st.floats(0, 1),
    st.floats(0, 0.5),
    st.sets(st.sampled_from("abcdefgh")),
)
def test_the_sites_of_auto_never_add_more_than_the_bound(
    sites: dict[str, float], layers: float, floor: float, forced: Collection[str]
) -> None:
    costs, always = Costs(layers, **sites), [name for name in sites if name in forced]
    choice = switch_on(list(sites), always, costs, floor)
    assert set(always) <= set(choice.on) <= set(sites)
    assert choice.after == pytest.approx(costs(choice.on)[0])
    assert choice.after - choice.before <= choice.bound + 1e-9
    assert choice.bound == max(ADDED_SHARE * layers, floor)
    assert costs.asked - 1 <= passes(list(sites), always)
    off = [name for name in sites if name not in choice.on]
    assert all(choice.after + sites[name] - choice.before > choice.bound - 1e-9 for name in off)


def test_rows_of_a_scan_have_no_weights() -> None:
    choice = switch_on(["a", "b"], ["a", "b"], Costs(1.0, a=0.1, b=0.2), floor=0.0)
    rows = sensitivities(choice, Costs(0.0, a=0.01, b=0.02))
    assert [(row.name, row.alone, row.weights, row.inputs) for row in rows] == [("a", 0.01, 0.0, 0.01), ("b", 0.02, 0.0, 0.02)]
    assert [row.gain for row in rows] == pytest.approx([0.1, 0.2])
