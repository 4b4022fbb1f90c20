"""The search over settings, on servers that are made up; the real one is in tests/triton_repo/test_tuned.py."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from foundation.core.errors import InputError
from tests.problems import raises_problem
from triton_repo.tuning.load import Level, Loaded, loaded
from triton_repo.tuning.settings import Tune
from triton_repo.tuning.space import Point, points
from triton_repo.tuning.tuning import NOISE, Measure, describe, in_words, search

pytestmark = pytest.mark.whole

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
    document = found.as_document("m").written()
    assert document["model"] == "m"
    assert document["best"] == {"instances": 2, "threads": 2, "max_batch_size": 32, "max_queue_delay_us": 0}
    assert len(document["trials"]) == len(points(Tune(), OWN, 4))
    assert document["trials"][0]["rows_per_s"] == 182.0
    assert document["trials"][0]["concurrency"] == 16
    assert document["confirmation"] == {
        "proposed": document["best"],
        "repeats": Tune().repeats,
        "rows_per_s": [182.0] * Tune().repeats,
        "own_rows_per_s": [108.0] * Tune().repeats,
        "ratio": {key: pytest.approx(182 / 108) for key in ("value", "low", "high")},
        "taken": True,
    }
    late = [trial for trial in document["trials"] if trial["max_queue_delay_us"] == 5000]
    assert all(trial["concurrency"] == 1 for trial in late), "under little load they are in time"


def test_a_higher_limit_lets_requests_wait() -> None:
    assert search(Tune(p99_ms=100.0), points(Tune(), OWN, 4), server).best == Point(2, 2, 32, 5000)


def test_nothing_changes_where_nothing_is_better() -> None:
    def flat(point: Point, seconds: float, limit_ms: float | None) -> Loaded:
        return Loaded((Level(1, 100.0 if point == OWN else 99.0, 1.0, 5.0, 0),), limit_ms)

    assert search(Tune(), points(Tune(), OWN, 4), flat).best == OWN


def noisy(seed: int, faster: float, start: float, rate: float, tail: float) -> Measure:
    """A server that two processes make faster. Its rate differs from start to start and, as does the p99, over short times."""
    draws = random.Random(seed)

    def measure(point: Point, seconds: float, limit_ms: float | None) -> Loaded:
        whole = (faster if point.instances == 2 else 1.0) * math.exp(draws.gauss(0, start))

        def ask(count: int) -> dict[str, Any]:
            rows = 1000 * whole * count / (count + 4) * math.exp(draws.gauss(0, rate / math.sqrt(seconds)))
            p99 = 2000 * count / rows * math.exp(draws.gauss(0, tail / math.sqrt(seconds)))
            return {"concurrency": count, "rows_per_s": rows, "latency_ms": {"p50": p99, "p99": p99, "max": p99}, "errors": {}}

        return loaded(ask, Tune().concurrency, limit_ms)

    return measure


@pytest.mark.first(1)
@pytest.mark.parametrize("noise", [(0.02, 0.04, 0.1), (0.05, 0.07, 0.2)])
@pytest.mark.parametrize("p99_ms", [None, 150.0])
def test_noise_is_not_taken_for_gain_and_gain_is_taken(p99_ms: float | None, noise: tuple[float, float, float]) -> None:
    """Of 200 searches over settings that are all the same at most 5 % change them; of 50 with a gain of a fifth, most do."""
    tune = Tune(p99_ms=p99_ms)
    tried = points(tune, OWN, 4)

    def changed(searches: int, faster: float) -> int:
        return sum(search(tune, tried, noisy(seed, faster, *noise)).best != OWN for seed in range(searches))

    assert changed(200, 1.0) <= 10
    assert changed(50, 1.2) >= 40


def test_settings_that_stay_come_first_and_say_why() -> None:
    found = next(
        found for seed in range(9) if (found := search(Tune(), points(Tune(), OWN, 4), noisy(seed, 1.0, 0.02, 0.04, 0.1))).confirmation
    )
    assert found.confirmation is not None
    assert (found.best, found.trials[0].point) == (OWN, OWN)
    assert found.confirmation.proposed != OWN
    sentence = in_words(found)
    assert f"{found.confirmation.ratio.low:.2f} to {found.confirmation.ratio.high:.2f} of {Tune().repeats} repeats" in sentence
    assert "the recipe's settings stay" in sentence


def test_a_limit_that_nothing_keeps_is_refused() -> None:
    with raises_problem("triton_repo.tune.p99_ms", "1", "smallest p99 was 5.0 ms", "give more"):
        search(Tune(p99_ms=1.0), points(Tune(), OWN, 4), server)


def test_a_server_that_refuses_under_every_load_is_told() -> None:
    def refusing(point: Point, seconds: float, limit_ms: float | None) -> Loaded:
        return Loaded((Level(1, 0.0, None, None, errors=7),), limit_ms)

    with pytest.raises(InputError, match="the settings of the recipe give errors under every load"):
        search(Tune(), points(Tune(), OWN, 4), refusing)


def test_in_words() -> None:
    assert describe(Point(2, 1, 8, 500)) == "2 processes of 1 thread, batches of up to 8, 500 us of waiting"
