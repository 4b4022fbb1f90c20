"""python -m pytest tests/triton_repo/load/test_arrivals.py"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_repo.load.arrivals import poisson


@given(st.floats(0.01, 5000), st.floats(0.1, 20), st.integers(0, 2**63))
def test_times_ascend_within_the_window_and_are_those_of_the_seed(rate, seconds, seed):
    times = poisson(rate, seconds, seed)
    assert (np.diff(times) > 0).all()
    assert len(times) == 0 or 0 <= times[0] <= times[-1] < seconds
    np.testing.assert_array_equal(times, poisson(rate, seconds, seed))


@pytest.mark.parametrize("rate", [20.0, 300.0])
def test_counts_are_poisson(rate):
    """Counts in 4,000 windows of 0.1 s: mean and variance are both 0.1 * rate; five standard errors are allowed."""
    mean, n = 0.1 * rate, 4000
    counts, _ = np.histogram(poisson(rate, 400.0, seed=7), bins=n, range=(0, 400))
    assert abs(counts.mean() - mean) < 5 * (mean / n) ** 0.5
    assert abs(counts.var() - mean) < 5 * ((mean + 2 * mean**2) / n) ** 0.5
    assert abs(np.corrcoef(counts[1:], counts[:-1])[0, 1]) < 5 / n**0.5, "windows are independent"


def test_gaps_are_exponential():
    """Share of gaps beyond t is exp(-rate * t)."""
    gaps = np.diff(poisson(100.0, 200.0, seed=3))
    for t in (0.002, 0.01, 0.03):
        share = np.exp(-100.0 * t)
        assert abs((gaps > t).mean() - share) < 5 * (share * (1 - share) / len(gaps)) ** 0.5


def test_other_seeds_give_other_times():
    assert not np.array_equal(poisson(50.0, 10.0, 1)[:100], poisson(50.0, 10.0, 2)[:100])


def test_a_block_that_is_too_short_is_continued(monkeypatch):
    class Fast:
        def exponential(self, scale, size):
            return np.full(size, scale / 50)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Fast())
    np.testing.assert_allclose(poisson(10.0, 1.0, 0), np.arange(1, 500) * 0.002)
