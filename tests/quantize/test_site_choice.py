"""The choice of sites on made-up costs."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.measure.closeness import ADDED_SHARE
from quantize.site_choice import passes, sensitivities, switch_on


class Costs:
    """A distance that is the sum of the costs of the sites, and counts how often it is asked for."""

    def __init__(self, layers: float, **sites: float) -> None:
        self.layers, self.sites, self.asked = layers, sites, 0

    def __call__(self, names: Collection[str]) -> float:
        self.asked += 1
        return self.layers + sum(self.sites[name] for name in names)


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
    def distance(names: Collection[str]) -> float:
        return 0.4 + (1.0 if {"a", "b"} <= set(names) else 0.0)

    assert switch_on(["a", "b"], [], distance, floor=0.0).on == ("a",)


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
    assert choice.after == pytest.approx(costs(choice.on))
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
