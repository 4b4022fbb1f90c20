"""The e-process against its definition written out, its martingale property by enumeration, and its promise by simulation."""

import itertools
import math

import numpy as np
import pytest

from foundation.standalone import e_process
from foundation.standalone.e_process import BETS, GROWTH, SMALLEST, EProcess

pytestmark = pytest.mark.whole

ALARM = 0.05
BOUNDS = (0.01, 0.2, 0.7)


def cash(count: int) -> float:
    return 1 / (1 + math.log(1 + count))


def rates(bound: float) -> list[float]:
    logits = [math.log(bound / (1 - bound)) + SMALLEST * GROWTH**place for place in range(BETS)]
    return [1 / (1 + math.exp(-logit)) for logit in logits]


def written_out(bound: float, values: list[float]) -> float:
    """E_t by the sum over bets and moments."""
    total = cash(len(values))
    for place in range(len(values)):
        for rate in rates(bound):
            factors = [1 + (rate - bound) / (bound * (1 - bound)) * (value - bound) for value in values[place:]]
            total += (cash(place) - cash(place + 1)) / BETS * math.prod(factors)
    return total


def every_stream(length: int) -> np.ndarray:
    """All streams of zeros and ones, float64 [2^length, length]."""
    return np.array(list(itertools.product((0.0, 1.0), repeat=length)))


def probability(streams: np.ndarray, rate: float) -> np.ndarray:
    ones = streams.sum(axis=1)
    return rate**ones * (1 - rate) ** (streams.shape[1] - ones)


@pytest.mark.parametrize("bound", BOUNDS)
def test_it_is_the_sum_over_bets_and_moments(bound):
    draw = np.random.default_rng(0)
    for sizes in ([1] * 9, [3, 1, 5], [9], [2, 2, 2, 2, 1]):
        process, values = EProcess(bound), []
        for size in sizes:
            values += (new := draw.choice([0.0, 1.0, 0.25, draw.random()], size)).tolist()
            process.update(new)
            assert process.log_values == pytest.approx(math.log(written_out(bound, values)), abs=1e-10)


@pytest.mark.parametrize("sizes", [[1] * 10, [4, 1, 5], [10]])
@pytest.mark.parametrize("bound", BOUNDS)
def test_at_the_bound_the_mean_is_one_at_every_moment_and_below_it_it_falls(bound, sizes):
    streams = every_stream(sum(sizes))
    process, start = EProcess(bound, (len(streams),)), 0
    for size in sizes:
        before = process.log_values
        process.update(streams[:, start : start + size])
        start += size
        assert probability(streams, bound) @ np.exp(process.log_values) == pytest.approx(1, abs=1e-9)
        for rate in (bound / 3, 0.9 * bound):  # given what came before, the mean is not above it
            weights = probability(streams[:, :start], rate)
            known = {tuple(row) for row in streams[:, : start - size]}
            for row in list(known)[:20]:
                same = (streams[:, : start - size] == row).all(axis=1)
                mean = weights[same] @ np.exp(process.log_values[same]) / weights[same].sum()
                assert mean < np.exp(before[same][0]) * (1 - 1e-12)


def test_the_mean_of_shares_is_not_above_one_either():
    """Requests of several rows: any values whose mean is the bound."""
    bound, values, weights = 0.3, np.array([0.0, 0.25, 0.5, 1.0]), np.array([0.4, 0.2, 0.3, 0.1])
    assert values @ weights == pytest.approx(bound)
    streams = np.array(list(itertools.product(range(4), repeat=5)))
    process = EProcess(bound, (len(streams),))
    for place in range(5):
        process.update(values[streams[:, place : place + 1]])
    assert weights[streams].prod(axis=1) @ np.exp(process.log_values) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("bound", BOUNDS)
def test_false_alarms_by_enumeration(bound):
    """Every stream of 15: how probable it is that an alarm comes at any moment, at a rate of exactly the bound."""
    streams = every_stream(15)
    process = EProcess(bound, (len(streams),))
    for place in range(streams.shape[1]):
        process.update(streams[:, place : place + 1])
    for allowed in (0.5, 0.2, 0.05):
        wrong = float(probability(streams, bound) @ process.alarms(allowed))
        assert 0 < wrong <= allowed
    assert np.all(process.largest >= process.log_values - 1e-12)
    assert np.any(process.largest > process.log_values + 0.1), "an alarm stays, though the capital is lost again"


def streams_with(rate: float, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).random(shape) < rate).astype(np.float64)


@pytest.mark.slow
def test_200_streams_of_100000_values_without_a_shift():
    bound = 0.1
    process, draw = EProcess(bound, (200,)), np.random.default_rng(1)
    for _ in range(1000):
        process.update((draw.random((200, 100)) < bound).astype(np.float64))
    assert process.count == 100_000
    most = 200 * ALARM + 3 * math.sqrt(200 * ALARM)  # three standard deviations: one in a thousand by chance
    assert process.alarms(ALARM).sum() <= most
    assert np.isfinite(process.log_values).all()


@pytest.mark.first(1)
@pytest.mark.parametrize(("bound", "shifted", "most"), [(0.1, 0.2, 900), (0.1, 0.4, 150), (0.01, 0.05, 1500)])
def test_a_shift_is_seen_soon_even_after_100000_values_without_one(bound, shifted, most):
    delays = []
    for quiet in (0, 100_000):
        process = EProcess(bound, (40,))
        for part in range(0, quiet, 200):
            process.update(streams_with(0.8 * bound, (40, 200), part))
        assert not process.alarms(1e-4).any()
        seen = np.full(40, np.inf)
        for step in range(0, 2 * most, 10):
            process.update(streams_with(shifted, (40, 10), 10**6 + step))
            seen = np.minimum(seen, np.where(process.alarms(ALARM), step + 10, np.inf))
        delays.append(float(np.median(seen)))
    assert delays[0] <= delays[1] <= most


def test_no_length_of_a_stream_is_too_long():
    process = EProcess(0.2)
    for value in (np.zeros(10_000), np.ones(10_000), np.zeros(10_000)):
        for _ in range(5):
            process.update(value)
    assert np.isfinite(process.log_values)
    assert process.largest > 50_000, "e to this power is no float"
    assert process.alarms(1e-300)
    process.count = 10**15
    process.update(np.array([1.0]))
    assert np.isfinite(process.log_values)
    assert process._capital.shape == (BETS,)


def test_values_that_come_together_are_as_values_that_come_one_by_one():
    values = streams_with(0.3, (5, 60), 0)
    together, one_by_one = EProcess(0.2, (5,)), EProcess(0.2, (5,))
    together.update(values)
    for place in range(60):
        one_by_one.update(values[:, place : place + 1])
    np.testing.assert_allclose(together.log_values, one_by_one.log_values, atol=1e-10)
    assert np.all(one_by_one.largest >= together.largest - 1e-10)


def test_it_starts_with_one_and_takes_no_values_as_nothing():
    process = EProcess(0.2, (3,))
    process.update(np.zeros((3, 0)))
    np.testing.assert_array_equal(process.log_values, np.zeros(3))
    assert not process.alarms(0.99).any()


@pytest.mark.parametrize("bound", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_bounds_that_cannot_be_tested(bound):
    with pytest.raises(ValueError, match="above 0 and below 1"):
        EProcess(bound)


@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan])
def test_values_outside_are_refused_and_change_nothing(value):
    process = EProcess(0.2)
    with pytest.raises(ValueError, match="0 to 1 is allowed"):
        process.update(np.array([0.5, value]))
    assert process.count == 0
    assert process.log_values == 0


def test_bets_are_above_the_bound_and_below_one():
    for bound in (1e-6, 0.01, 0.5, 0.999):
        found = e_process._alternatives(bound)
        assert np.all(np.diff(found) > 0)
        assert bound < found[0] < found[-1] < 1
