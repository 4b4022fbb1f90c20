from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prune.allocation import STEPS, Part, by_distance, by_score, by_worth, cheapest, top, uniform

parts = st.lists(
    st.builds(
        lambda size, cost, step, protected: (size, cost, step, protected),
        st.integers(1, 12),
        st.sampled_from([1.0, 3.0, 7.0]),
        st.integers(1, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
).map(lambda rows: [Part(block, "ffn", size, cost, size, step, 1, protected) for block, (size, cost, step, protected) in enumerate(rows)])
fractions = st.floats(0, 1)


def cost_of(counts: dict[Part, int]) -> float:
    return sum(part.cost * count for part, count in counts.items())


def budget_at(parts: list[Part], fraction: float) -> float:
    most = sum(part.cost * part.size for part in parts)
    return cheapest(parts) + fraction * (most - cheapest(parts))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_counts_are_multiples_or_all(size: int, step: int, least: int) -> None:
    counts = Part(0, "ffn", size, 1.0, size, step, least).counts()
    assert counts[0] == size
    assert counts == sorted(set(counts), reverse=True)
    assert all(count % step == 0 for count in counts[1:])
    assert counts[-1] >= min(size, least)
    assert Part(0, "ffn", size, 1.0, size, step, least, protected=True).counts() == [size]


@given(parts, fractions, st.integers(0, 999))
def test_every_allocation_keeps_to_the_budget_and_to_what_may_be(parts: list[Part], fraction: float, seed: int) -> None:
    budget = budget_at(parts, fraction)
    scores = {part: torch.rand(part.size, generator=torch.Generator().manual_seed(seed + part.block)) for part in parts}
    found = [
        uniform(parts, budget),
        by_score(parts, scores, budget),
        by_distance(parts, lambda part, count: float(part.size - count), budget),
    ]
    for counts in found:
        assert cost_of(dict(counts)) <= budget * (1 + 1e-9)
        assert all(count in part.counts() for part, count in counts.items())


@given(parts, fractions)
def test_uniform_is_the_largest_share_that_fits(parts: list[Part], fraction: float) -> None:
    budget = budget_at(parts, fraction)
    best: dict[Part, int] = {}
    for share in range(2001):  # every share at which some count changes lies at an odd multiple of 1 / (2 size)
        counts = {part: min(part.counts(), key=lambda count: (abs(count - share / 2000 * part.size), -count)) for part in parts}
        best = counts if cost_of(counts) <= budget * (1 + 1e-12) else best
    found = dict(uniform(parts, budget))
    assert cost_of(found) >= cost_of(best) - 1e-9 or not best


@given(parts, fractions, st.integers(0, 999))
def test_the_least_important_go_first(parts: list[Part], fraction: float, seed: int) -> None:
    """Written out: take away one piece at a time, the one with the lowest mean score per cost that is on top of its component."""
    budget = budget_at(parts, fraction)
    scores = {part: torch.rand(part.size, generator=torch.Generator().manual_seed(seed + part.block)) for part in parts}
    left = {part: part.size for part in parts}
    while cost_of(left) > budget * (1 + 1e-12):
        candidates = []
        for part in parts:
            counts = part.counts()
            position = counts.index(left[part])
            if position + 1 < len(counts):
                ascending = sorted(scores[part].double().tolist())
                piece = ascending[part.size - left[part] : part.size - counts[position + 1]]
                candidates.append((sum(piece) / len(piece) / part.cost, part.block, part, counts[position + 1]))
        _, _, part, fewer = min(candidates, key=lambda entry: entry[:2])
        left[part] = fewer
    assert dict(by_score(parts, scores, budget)) == left


@given(parts, fractions, st.integers(0, 999))
def test_the_distance_is_the_least_of_all_that_fit(parts: list[Part], fraction: float, seed: int) -> None:
    budget = budget_at(parts, fraction)
    table = {
        (part, count): float(torch.rand((), generator=torch.Generator().manual_seed(seed + 100 * part.block + count))) * (part.size - count)
        for part in parts
        for count in part.counts()
    }
    room = budget - cheapest(parts)

    def steps(counts: dict[Part, int]) -> int:  # costs are rounded up to steps of the budget
        extra = {part: part.cost * (count - part.counts()[-1]) for part, count in counts.items()}
        return sum(math.ceil(cost / (room / STEPS) - 1e-9) if room > 0 else STEPS * bool(cost) + bool(cost) for cost in extra.values())

    choices = [dict(zip(parts, counts, strict=True)) for counts in itertools.product(*(part.counts() for part in parts))]
    best = min(sum(table[entry] for entry in counts.items()) for counts in choices if steps(counts) <= STEPS)
    found = by_distance(parts, lambda part, count: table[part, count], budget)
    assert sum(table[entry] for entry in found.items()) == pytest.approx(best)


def test_of_equal_scores_the_lowest_index_is_kept() -> None:
    assert top(torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0]), 2) == [1, 2]
    assert top(torch.zeros(5), 3) == [0, 1, 2]
    assert top(torch.tensor([0.0, 1.0, 0.0]), 2) == [0, 1]


prices = st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=3, max_size=13).map(lambda steps: tuple(itertools.accumulate(steps)))


@given(st.lists(st.tuples(prices, st.integers(1, 4)), min_size=1, max_size=3), fractions, st.integers(0, 999))
def test_prices_of_their_own_keep_to_the_budget(rows: list[tuple[tuple[float, ...], int]], fraction: float, seed: int) -> None:
    parts = [Part(block, "ffn", len(row) - 1, 1.0, len(row) - 1, step, prices=row) for block, (row, step) in enumerate(rows)]
    most = sum(part.price(part.size) for part in parts)
    budget = cheapest(parts) + fraction * (most - cheapest(parts))
    scores = {part: torch.rand(part.size, generator=torch.Generator().manual_seed(seed + part.block)) for part in parts}
    for counts in (
        uniform(parts, budget),
        by_score(parts, scores, budget),
        by_distance(parts, lambda part, count: float(part.size - count), budget),
    ):
        assert sum(part.price(count) for part, count in counts.items()) <= budget + 1e-9
        assert all(count in part.counts() for part, count in counts.items())


def test_steps_that_save_nothing_go_with_those_that_do() -> None:
    flat = Part(0, "ffn", 4, 1.0, 4, prices=(0.0, 1.0, 1.0, 1.0, 4.0))
    scores = {flat: torch.tensor([1.0, 2.0, 3.0, 4.0])}
    assert by_score([flat], scores, 3.0) == {flat: 3}
    level = Part(0, "ffn", 4, 1.0, 4, prices=(0.0, 1.0, 4.0, 4.0, 4.0))
    assert by_score([level], {level: scores[flat]}, 3.0) == {level: 1}
    assert by_score([level], {level: scores[flat]}, 4.0) == {level: 4}


def test_by_worth_cuts_the_lowest_whatever_a_unit_costs() -> None:
    cheap, dear = Part(0, "ffn", 3, 1.0, 3), Part(0, "heads", 3, 10.0, 3)
    allocate = by_worth({(0, "ffn"): torch.tensor([0.9, 0.8, 0.7]), (0, "heads"): torch.tensor([0.1, 0.95, 0.75])})
    assert allocate([cheap, dear], 23.0) == {cheap: 3, dear: 2}
    assert allocate([cheap, dear], 22.0) == {cheap: 2, dear: 2}
