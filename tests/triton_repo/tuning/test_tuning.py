"""The search over settings, on servers that are made up; the real one is in tests/triton_repo/test_tuned.py."""

from __future__ import annotations

import pytest

from compress.core.errors import InputError
from triton_repo.tuning.load import Level, Loaded
from triton_repo.tuning.settings import Tune
from triton_repo.tuning.space import Point, points
from triton_repo.tuning.tuning import NOISE, describe, search

OWN = Point(1, 4, 8, 0)


def server(point: Point, seconds: float, limit_ms: float | None) -> Loaded:
    """Two processes are the fastest; waiting for others answers more rows, too late for a limit of 20 ms."""
    rate = 100.0 * {1: 1.0, 2: 1.5, 4: 1.2}[point.instances] + point.max_batch_size + point.max_queue_delay_us / 10
    p99 = 10.0 + point.max_queue_delay_us / 100
    return Loaded((Level(1, 50.0, 1.0, 5.0, 0), Level(16, rate, 4.0, p99, 0)), limit_ms)


def test_the_best_settings_within_the_p99_of_the_recipe_are_found() -> None:
    found = search(Tune(), points(Tune(), OWN, 4), server)
    assert found.limit_ms == NOISE * 10.0
    assert found.best == Point(2, 2, 32, 0)
    document = found.as_document()
    assert document["best"] == {"instances": 2, "threads": 2, "max_batch_size": 32, "max_queue_delay_us": 0}
    assert len(document["trials"]) == len(points(Tune(), OWN, 4))
    assert document["trials"][0]["rows_per_s"] == 182.0
    assert document["trials"][0]["concurrency"] == 16
    late = [trial for trial in document["trials"] if trial["max_queue_delay_us"] == 5000]
    assert all(trial["concurrency"] == 1 for trial in late), "under little load they are in time"


def test_a_higher_limit_lets_requests_wait() -> None:
    assert search(Tune(p99_ms=100.0), points(Tune(), OWN, 4), server).best == Point(2, 2, 32, 5000)


def test_nothing_changes_where_nothing_is_better() -> None:
    def flat(point: Point, seconds: float, limit_ms: float | None) -> Loaded:
        return Loaded((Level(1, 100.0 if point == OWN else 99.0, 1.0, 5.0, 0),), limit_ms)

    assert search(Tune(), points(Tune(), OWN, 4), flat).best == OWN


def test_a_limit_that_nothing_keeps_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"triton_repo.tune.p99_ms: 1 given; no setting stays within it \(the smallest p99 was 5.0 ms\); give more"
    ):
        search(Tune(p99_ms=1.0), points(Tune(), OWN, 4), server)


def test_a_server_that_refuses_under_every_load_is_told() -> None:
    def refusing(point: Point, seconds: float, limit_ms: float | None) -> Loaded:
        return Loaded((Level(1, 0.0, None, None, errors=7),), limit_ms)

    with pytest.raises(InputError, match="the settings of the recipe give errors under every load"):
        search(Tune(), points(Tune(), OWN, 4), refusing)


def test_in_words() -> None:
    assert describe(Point(2, 1, 8, 500)) == "2 processes of 1 thread, batches of up to 8, 500 us of waiting"
