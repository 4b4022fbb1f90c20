"""What two settings that are measured in turns say about each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from triton_repo.tuning.confirmation import Confirmation, confirm

pytestmark = pytest.mark.whole


@dataclass(frozen=True)
class Rate:
    rate: float


def test_both_are_measured_in_turns_and_every_second_turn_goes_backwards() -> None:
    """On a machine that slows down from one measurement to the next, two settings that are the same are equal over two turns."""
    seen: list[str] = []

    def measure(point: str) -> Rate:
        seen.append(point)
        return Rate(100.0 - len(seen))

    found = confirm("own", "new", measure, 4)
    assert seen == ["own", "new", "new", "own"] * 2
    assert (found.own_rates, found.rates) == ((99, 96, 95, 92), (98, 97, 94, 93))
    assert not found.taken
    assert found.ratio.value == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("gain", [0.9, 1.0, 1.03, 1.2])
def test_taken_is_what_a_paired_t_test_calls_faster(gain: float) -> None:
    draws = np.random.default_rng(0)
    decided = []
    for _ in range(200):
        own, new = (100 * scale * np.exp(draws.normal(0, 0.03, 6)) for scale in (1.0, gain))
        found = Confirmation("new", tuple(own), tuple(new))
        tested = ttest_1samp(np.log(new / own), 0).confidence_interval()
        assert found.ratio == pytest.approx((np.exp(np.log(new / own).mean()), np.exp(tested.low), np.exp(tested.high)), rel=1e-3)
        decided.append(found.taken)
    assert np.mean(decided) <= 0.05 if gain <= 1 else np.mean(decided) >= (0.9 if gain == 1.2 else 0.2)


def test_settings_that_are_never_within_the_limit_are_replaced_by_others_that_are() -> None:
    never, always = (0.0,) * 6, (80.0, 90.0, 85.0, 88.0, 84.0, 86.0)
    found = Confirmation("new", never, always)
    assert (found.taken, found.ratio) == (True, (None, None, None))
    assert found.as_document().ratio.written() == {"value": None, "low": None, "high": None}
    assert Confirmation("new", always, never).ratio == (0, 0, 0)
    assert not Confirmation("new", always, never).taken
    assert not Confirmation("new", never, never).taken
    seldom = (0.0, 80.0, 0.0, 90.0, 85.0, 0.0)
    assert not Confirmation("new", seldom[::-1], seldom).taken
    assert Confirmation("new", (0.0, *always[1:]), tuple(2 * rate for rate in always)).taken
