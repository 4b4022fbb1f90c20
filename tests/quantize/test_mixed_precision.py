import itertools
from collections.abc import Collection

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
    assert len(choice.floating) == (enough[0] if enough else min(most, len(ranking)))
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


def test_the_limit_holds_where_any_layer_breaks_the_model() -> None:
    choice = choose(["a", "b", "c"], lambda names: float(bool(names)), 0.5, 2)
    assert (choice.floating, choice.loss, choice.before, choice.met) == (("a", "b"), 1.0, 1.0, False)
