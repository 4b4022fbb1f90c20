"""How many rows the gate of a language model looks at."""

from __future__ import annotations

import math

import numpy as np
import pytest

from export.parity.rows import LEAST_PREDICTIONS, in_order_of_looks, looks, passes_clearly
from foundation.standalone.tolerance import RATE, judge


@pytest.mark.parametrize(
    ("rows", "predictions", "expected"),
    [
        (1000, 1000, [1000]),  # a row is one prediction: all are needed
        (1000, 127_000, [24, 48, 96, 192, 384, 768, 1000]),
        (200, 25_400, [24, 48, 96, 192, 200]),
        (24, 24 * 127, [24]),
        (3, 3 * 127, [3]),
        (40, 40 * 10_000, [1, 2, 4, 8, 16, 32, 40]),
    ],
)
def test_looks_double_from_the_fewest_rows_that_can_be_enough(rows: int, predictions: int, expected: list[int]) -> None:
    assert looks(rows, predictions) == expected


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 100, 1000])
def test_every_beginning_of_the_order_is_evenly_spread(rows: int) -> None:
    order = in_order_of_looks(rows)
    assert sorted(order) == list(range(rows))
    for count in range(1, rows + 1):
        gaps = np.diff([-1, *sorted(order[:count]), rows])
        assert gaps.max() <= 4 * math.ceil(rows / count) + 1


def judged(others_n: list[int], tokens: int, distance: float) -> bool:
    counts = np.array(others_n)
    changed = np.concatenate([np.arange(tokens) < count for count in counts])
    distances = np.full(len(changed), distance)
    return passes_clearly(judge(changed, distances), counts, distances)


def test_few_differences_pass_clearly_and_many_do_not() -> None:
    rows, tokens = 24, 127
    assert judged([0] * rows, tokens, 0.0)
    assert not judged([0] * (rows - 1), tokens, 0.0)  # too few rows to tell, whatever they say
    assert not judged([1] + [0] * (rows - 1), tokens, 0.0)
    assert judged([1] + [0] * (2 * rows - 1), tokens, 0.0)
    assert not judged([0] * rows, tokens, 0.021)


def test_differences_that_come_together_count_for_less_rows() -> None:
    spread, heaped = [1] * 10 + [0] * 240, [10] + [0] * 249
    assert judged(spread, 127, 0.0)
    assert not judged(heaped, 127, 0.0)


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize(("rate", "most"), [(RATE, 130), (3 * RATE, 4)])
def test_an_engine_at_the_limit_passes_early_once_in_twenty_and_a_wrong_one_hardly_ever(rate: float, most: int) -> None:
    drawn, passed, rows = np.random.default_rng(0), 0, 4 * LEAST_PREDICTIONS // 127
    for _ in range(2000):
        passed += judged(drawn.binomial(127, rate, rows).tolist(), 127, 0.0)
    assert passed <= most  # of 2,000
