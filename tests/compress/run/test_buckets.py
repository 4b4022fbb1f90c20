"""Buckets against every possible choice: python -m pytest tests/compress/run/test_buckets.py"""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.run.buckets import CLOSE, candidates, choose, costs_at, measured_at, most_buckets


def naive(rows, measured, max_length, buckets) -> float:
    """The mean cost of rows that are each padded to their smallest bucket."""
    price = dict(zip(candidates(max_length), costs_at(candidates(max_length), measured), strict=True))
    return sum(price[min(bucket for bucket in buckets if bucket >= min(row, max_length))] for row in rows) / len(rows)


def every_choice(max_length, count):
    """All sets of `count` buckets with max_length among them."""
    return [(*chosen, max_length) for chosen in combinations(candidates(max_length)[:-1], count - 1)]


@given(st.data())
def test_the_least_cost_of_all_choices(data):
    max_length = data.draw(st.integers(2, 72))
    rows = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=30))
    measured = {length: data.draw(st.floats(0.1, 10)) for length in measured_at(max_length)}
    most = data.draw(st.integers(1, 4))
    found = choose(rows, measured, max_length, most)
    least = [
        min(naive(rows, measured, max_length, buckets) for buckets in every_choice(max_length, count))
        for count in range(1, min(most, len(candidates(max_length))) + 1)
    ]
    np.testing.assert_allclose(found.costs, least, rtol=1e-9)
    assert found.cost == pytest.approx(naive(rows, measured, max_length, found.buckets))
    assert found.buckets == tuple(sorted(set(found.buckets)))
    assert found.buckets[-1] == max_length
    # no smaller number would have done
    assert found.cost <= min(least) * (1 + CLOSE) * (1 + 1e-9)
    assert all(cost > min(least) * (1 + CLOSE) for cost in least[: len(found.buckets) - 1])


def test_rows_of_two_lengths_get_two_buckets():
    found = choose([10] * 50 + [100] * 50, {8: 8.0, 128: 128.0}, 128, 6)
    assert found.buckets == (16, 104, 128)
    assert found.cost == pytest.approx((16 + 104) / 2)
    assert choose([10] * 50 + [100] * 50, {8: 8.0, 128: 128.0}, 128, 1).buckets == (128,)


def test_where_length_costs_nothing_one_bucket_does():
    assert choose([5, 50, 100], {8: 1.0, 128: 1.0}, 128, 6).buckets == (128,)


def test_a_measurement_above_that_of_a_longer_row_is_taken_for_noise():
    np.testing.assert_allclose(costs_at([8, 16, 24, 32], {8: 1.0, 16: 3.0, 32: 2.0}), [1, 2, 2, 2])


@given(st.dictionaries(st.integers(1, 600), st.floats(0.01, 200), min_size=1, max_size=15))
def test_a_row_costs_the_least_of_what_it_and_longer_ones_took(measured):
    points = sorted(measured)
    assert costs_at(points, measured).tolist() == [min(measured[longer] for longer in points if longer >= point) for point in points]


@pytest.mark.parametrize("spoilt", [length for length in measured_at(128) if length < 128])
def test_one_slow_sample_spoils_no_choice(spoilt):
    rows = np.random.default_rng(0).integers(5, 100, 500).tolist()
    true = {length: 0.5 + 0.1 * -(-length // 32) for length in measured_at(128)}
    noisy = choose(rows, {**true, spoilt: 129.0}, 128, 6)
    assert naive(rows, true, 128, noisy.buckets) < 1.05 * choose(rows, true, 128, 6).cost


def test_candidates_end_at_the_longest_length():
    assert candidates(5) == [5]
    assert candidates(20) == [8, 16, 20]
    assert len(candidates(4096)) == 256
    assert measured_at(40) == [8, 16, 24, 32, 40]


def test_memory_bounds_their_number():
    assert most_buckets(1000, 100, (1, 8)) == 5
    assert most_buckets(10, 100, (1, 8)) == 1
