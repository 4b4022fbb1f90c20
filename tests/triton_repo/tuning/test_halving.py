"""Successive halving: who is measured for how long, and who wins."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from triton_repo.tuning.halving import FINALISTS, KEPT, halve, rounds


@dataclass(frozen=True)
class Measured:
    rate: float


RATES = st.lists(st.integers(0, 50), min_size=1, max_size=60)


@given(RATES)
@settings(max_examples=100, deadline=None)
def test_the_fastest_wins_and_the_settings_of_the_recipe_see_every_round(rates: list[int]) -> None:
    asked: list[tuple[int, float]] = []

    def measure(point: int, seconds: float) -> Measured:
        asked.append((point, seconds))
        return Measured(rates[point])

    found = halve(range(len(rates)), measure, 2.0)
    assert sorted(trial.point for trial in found) == list(range(len(rates)))
    assert found[0].measured.rate == max(rates)
    lengths = Counter(seconds for _, seconds in asked)
    assert list(lengths.values()) == list(rounds(len(rates)))
    assert sorted(lengths) == [2.0 * KEPT**number for number in range(len(lengths))]
    assert sum(point == 0 for point, _ in asked) == len(lengths)
    # written out: of each round a third goes on, the first point among them
    left = list(range(len(rates)))
    for seconds in sorted(lengths):
        assert Counter(left) == Counter(point for point, length in asked if length == seconds)
        count = max(FINALISTS, math.ceil(len(left) / KEPT))
        left = [0, *sorted((point for point in left if point), key=lambda point: -rates[point])[: count - 1]]


def test_a_lucky_short_measurement_is_not_believed() -> None:
    short = {0: 10.0, 1: 9.0, 2: 50.0, 3: 8.0, 4: 7.0}

    def measure(point: int, seconds: float) -> Measured:
        return Measured(short[point] if seconds == 1 else 10.0 - point)

    assert halve(list(short), measure, 1.0)[0].point == 0


def test_few_points_are_measured_once() -> None:
    assert list(rounds(1)) == [1]
    assert list(rounds(3)) == [3]
    assert list(rounds(4)) == [4, 3]
    assert list(rounds(28)) == [28, 10, 4, 3]
