"""Experts are placed by their load: as many on each rank, never worse than in order, and near the best placement there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.divided.placement import Placement, busiest, busiest_of_layers, in_order, measured_loads, placed

LOADS = st.one_of(st.integers(0, 50), st.sampled_from([0, 0, 1, 1000]))


def every(experts: Sequence[int], ranks: int) -> Iterator[Placement]:
    """All placements with as many experts on each rank, written out."""
    each = len(experts) // ranks
    if ranks == 1:
        yield (tuple(experts),)
        return

    def chosen(left: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
        if count == 0:
            yield ()
            return
        for place in range(len(left)):
            for rest in chosen(left[place + 1 :], count - 1):
                yield (left[place], *rest)

    for rest in chosen(experts[1:], each - 1):  # the first expert lies on the first rank
        own = (experts[0], *rest)
        for others in every([expert for expert in experts if expert not in own], ranks - 1):
            yield (own, *others)


@given(st.sampled_from([(2, 2), (2, 4), (2, 8), (3, 6), (4, 8), (4, 4), (1, 3)]), st.data())
def test_a_placement_is_never_worse_than_in_order_and_near_the_best(sizes: tuple[int, int], data: st.DataObject) -> None:
    ranks, experts = sizes
    load_E = data.draw(st.lists(LOADS, min_size=experts, max_size=experts))
    found = placed(load_E, ranks)
    assert sorted(expert for held in found for expert in held) == list(range(experts))
    assert {len(held) for held in found} == {experts // ranks}
    assert all(list(held) == sorted(held) for held in found)
    assert busiest(load_E, found) <= busiest(load_E, in_order(experts, ranks))
    best = min(busiest(load_E, placement) for placement in every(range(experts), ranks))
    assert best <= busiest(load_E, found) + 1e-9
    assert busiest(load_E, found) <= 4 / 3 * best + 1e-9


def test_busy_experts_are_parted() -> None:
    assert placed([100, 90, 1, 2], 2) == ((0, 2), (1, 3))
    assert placed([5, 5, 5, 5], 2) == in_order(4, 2)  # nothing to gain
    assert placed([0, 0, 0, 0], 2) == in_order(4, 2)


def test_the_busiest_expert_lies_with_those_that_read_least() -> None:
    load_E = [1000 // (1 + expert) for expert in range(64)]
    found = placed(load_E, 8)
    (own,) = (held for held in found if 0 in held)
    assert sum(load_E[expert] for expert in own) == 1000 + sum(sorted(load_E)[:7])
    assert busiest(load_E, found) == pytest.approx(sum(load_E[expert] for expert in own) * 8 / sum(load_E))


def test_the_busiest_rank_is_a_multiple_of_the_mean() -> None:
    assert busiest([3, 1], ((0,), (1,))) == 1.5
    assert busiest([0, 0], ((0,), (1,))) == 1.0
    loads = {"a": [3.0, 1.0], "b": [1.0, 1.0]}
    assert busiest_of_layers(loads, {"a": ((0,), (1,)), "b": ((0,), (1,))}) == 1.25


def test_loads_come_from_the_stage_before() -> None:
    layers = ["layer.0", "layer.2"]
    assert measured_loads({"experts": {"layer.2": [1, 2], "layer.0": [3, 4]}}, layers) == {"layer.0": [3.0, 4.0], "layer.2": [1.0, 2.0]}
    of_prune = {"loads": {"before": [], "after": [[0.25, 0.75], [], [0.5, 0.5]]}}
    assert measured_loads(of_prune, layers) == {"layer.0": [0.25, 0.75], "layer.2": [0.5, 0.5]}
    for nothing in ({}, {"loads": {"after": [[1.0]]}}, {"experts": {"layer.0": [1]}}):
        assert measured_loads(nothing, layers) == {}
