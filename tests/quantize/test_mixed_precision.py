import itertools
from collections.abc import Collection
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quantize.mixed_precision import choose

COSTS = st.lists(st.floats(0, 1), max_size=8)


def additive(costs: list[float]) -> tuple[list[str], dict[str, float]]:
    cost = {f"layer{index}": value for index, value in enumerate(costs)}
    return sorted(cost, key=lambda name: -cost[name]), cost


@given(COSTS, st.floats(0, 4), st.integers(0, 8))
def test_fewest_layers_where_costs_add_up(costs: list[float], budget: float, most: int) -> None:
    ranking, cost = additive(costs)

    def loss(names: Collection[str]) -> float:
        return sum(sorted(cost[name] for name in names))

    choice = choose(ranking, loss, budget, most)
    enough = [
        count
        for count in range(min(most, len(ranking)) + 1)
        if any(loss(set(ranking) - set(kept)) <= budget for kept in itertools.combinations(ranking, count))
    ]
    assert choice.met == bool(enough)
    if enough:
        assert len(choice.floating) == enough[0]
    else:
        assert choice.loss == loss(ranking[most:])
    assert choice.loss == loss(set(ranking) - set(choice.floating))
    assert choice.before == loss(ranking)


@given(st.permutations(["a", "b", "c", "d"]), st.sampled_from(["a", "b", "c", "d"]))
def test_a_wrong_ranking_is_mended(ranking: list[str], culprit: str) -> None:
    choice = choose(ranking, lambda names: float(culprit in names), 0.5, 4)
    assert choice.floating == (culprit,)


def test_nothing_stays_float_where_int8_is_good_enough() -> None:
    calls: list[Collection[str]] = []
    choice = choose(["a", "b"], lambda names: calls.append(names) or 0.1, 0.1, 2)
    assert (choice.floating, choice.loss, choice.before, choice.met, choice.passes) == ((), 0.1, 0.1, True, 1)
    assert calls == [("a", "b")]


@given(st.integers(1, 5), st.integers(0, 5), st.floats(0, 1), st.integers(0, 2**31))
def test_a_loss_that_rises_and_falls_is_met_by_the_shortest_prefix_or_less(depth: int, most: int, budget: float, seed: int) -> None:
    """Against all prefixes, with a random loss for every set of layers."""
    ranking = [f"layer{index}" for index in range(depth)]
    losses: dict[frozenset[str], float] = {}
    random = np.random.default_rng(seed)

    def loss(names: Collection[str]) -> float:
        return losses.setdefault(frozenset(names), float(random.random()))

    choice = choose(ranking, loss, budget, most)
    naive = [loss(ranking[length:]) for length in range(min(most, depth) + 1)]
    enough = [length for length, value in enumerate(naive) if value <= budget]
    assert choice.loss == loss(set(ranking) - set(choice.floating))
    assert choice.met == (choice.loss <= budget)
    if enough:
        assert choice.met
        assert len(choice.floating) <= enough[0]
    else:
        assert choice.loss <= min(naive)
        assert len(choice.floating) <= naive.index(min(naive))


def test_a_shorter_prefix_that_meets_the_budget_is_found() -> None:
    """One float layer is enough, two are worse again."""
    loss = {3: 0.9, 2: 0.1, 1: 0.8, 0: 0.7}
    choice = choose(["a", "b", "c"], lambda names: loss[len(names)], 0.2, 2)
    assert (choice.floating, choice.loss, choice.met) == (("a",), 0.1, True)
    assert choose(["a", "b", "c"], lambda names: loss[len(names)], 0.05, 2) == replace(choice, met=False, passes=3)


def test_float_layers_that_gain_nothing_stay_int8() -> None:
    choice = choose(["a", "b", "c"], lambda names: float(bool(names)), 0.5, 2)
    assert (choice.floating, choice.loss, choice.before, choice.met) == ((), 1.0, 1.0, False)
