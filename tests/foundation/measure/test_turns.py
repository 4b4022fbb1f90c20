"""Ratios within turns, against the formula written out."""

import math
from statistics import fmean, stdev

import pytest

from foundation.artifacts.timed import Timing
from foundation.measure.turns import quantile, ratio


def row(*turns: float | None) -> Timing:
    known = [turn for turn in turns if turn is not None]
    return Timing(p50_ms=sorted(known)[len(known) // 2], turns_ms=turns)


def test_a_slow_turn_of_the_machine_is_in_no_ratio() -> None:
    """Both engines take three times as long in the second turn."""
    found = ratio(row(20.0, 60.0, 20.0), row(2.0, 6.0, 2.0))
    assert (found.value, found.low, found.high) == (pytest.approx(10), pytest.approx(10), pytest.approx(10))


def test_the_interval_is_students_t_over_turns() -> None:
    logs = [math.log(20 / 2), math.log(22 / 2), math.log(21 / 2.5)]
    half = 4.302653 * stdev(logs) / math.sqrt(3)
    found = ratio(row(20.0, 22.0, 21.0), row(2.0, 2.0, 2.5))
    assert found.value == pytest.approx(math.exp(fmean(logs)))
    assert (found.low, found.high) == (pytest.approx(math.exp(fmean(logs) - half)), pytest.approx(math.exp(fmean(logs) + half)))
    assert quantile(2) == pytest.approx(4.302653)


def test_only_turns_that_both_took_count() -> None:
    found = ratio(row(20.0, None, 44.0), row(2.0, 9.0, 4.0))
    assert found.value == pytest.approx(math.sqrt(10 * 11))
    assert ratio(row(20.0, 30.0), row(2.0)).low is None


def test_rows_of_older_runs_have_the_ratio_of_their_medians() -> None:
    assert ratio(Timing(p50_ms=9.0), Timing(p50_ms=3.0)).value == 3.0
