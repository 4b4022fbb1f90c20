"""Rising load: where it ends, and which load counts."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from triton_repo.tuning.load import GAIN, SATURATED, Level, level_of, loaded, saturation


def figures(concurrency: int, rate: float, p99: float | None, largest: float | None = 9.0, refused: int = 0) -> dict[str, Any]:
    errors = {"refused": {"n": refused}, "failed": {"n": 0}, "timed_out": {"n": 0}}
    return {
        "concurrency": concurrency,
        "rows_per_s": rate,
        "latency_ms": {"p50": 1.0, "p90": 2.0, "p99": p99, "max": largest},
        "errors": errors,
    }


SERVERS = st.lists(st.tuples(st.floats(0.1, 1000), st.floats(0.1, 100), st.sampled_from([0, 0, 0, 1])), min_size=1, max_size=6)


@given(SERVERS, st.none() | st.floats(0.1, 100))
@settings(max_examples=100, deadline=None)
def test_the_most_rows_within_the_limit_count(server: list[tuple[float, float, int]], limit: float | None) -> None:
    loads = [2**number for number in range(len(server))]
    answers = {load: figures(load, rate, p99, refused=refused) for load, (rate, p99, refused) in zip(loads, server, strict=True)}
    asked: list[int] = []

    def ask(concurrency: int) -> dict[str, Any]:
        asked.append(concurrency)
        return answers[concurrency]

    found = loaded(ask, loads, limit)
    expected, best, before = [], 0.0, 0.0  # written out
    for load, (rate, p99, refused) in zip(loads, server, strict=True):
        expected.append(load)
        if refused or (limit is not None and p99 > limit):
            break
        best = max(best, rate)
        if before and rate < GAIN * before:
            break
        before = rate
    assert asked == expected
    assert found.rate == best
    assert (found.best is None) == (best == 0)


def test_a_short_measurement_counts_with_its_slowest_answer() -> None:
    assert level_of(figures(4, 10.0, None, largest=7.5)).p99_ms == 7.5
    nothing = level_of(figures(4, 0.0, None, largest=None))
    assert not nothing.within(None)


def test_a_server_is_saturated_by_the_smallest_load_that_nearly_reaches_its_best() -> None:
    levels = [Level(load, rate, 1.0, p99, 0) for load, rate, p99 in ((1, 50.0, 2.0), (4, 100 * SATURATED, 5.0), (16, 100.0, 20.0))]
    assert saturation(levels) == levels[1]
    assert saturation([Level(1, 50.0, 1.0, 2.0, errors=3)]) is None
