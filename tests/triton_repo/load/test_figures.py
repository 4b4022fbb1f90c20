"""The figures against sorted lists: python -m pytest tests/triton_repo/load/test_figures.py"""

import json
import math

import numpy as np
import pytest

from foundation.core.errors import InputError
from triton_repo.load.figures import COLUMNS, figures, header, line
from triton_repo.load.generator import Failure, Samples
from triton_repo.load.settings import MOST_REQUESTS, Load

OPEN = Load(rate=100.0, seconds=3.0, rows=4)


def samples(latencies_ms, lost=(), rate=100.0) -> Samples:
    """Requests that are due 10 ms apart; `lost` are the kinds of further ones."""
    made = Samples(lag=[0.0001] * len(latencies_ms), cpu_seconds=0.3, wall_seconds=3.0)
    for index, latency in enumerate(latencies_ms):
        made.add(index / rate, index / rate + latency / 1e3, None)
    for index, kind in enumerate(lost):
        ended = math.nan if kind == "shed" else index / rate + 0.05
        made.add(index / rate, ended, Failure(kind, f"why {kind}"))
    return made


def nearest(values, percent: float) -> float:
    """The smallest sample with at least so many below: the sample at this place, rounded up."""
    return sorted(values)[math.ceil(percent / 100 * (len(values) - 1))]


def test_latencies_and_rates():
    taken = np.random.default_rng(0).exponential(20, 300).tolist()
    found = figures(samples(taken), OPEN)
    assert found["latency_ms"] == pytest.approx(
        {"p50": np.median(taken), **{f"p{p}": np.percentile(taken, p) for p in (90, 99)}, "max": max(taken)}, abs=1e-3
    )
    spent = max(3.0, max(index / 100 + one / 1e3 for index, one in enumerate(taken)))
    assert (found["n"], found["answered"], found["sent_per_s"]) == (300, 300, 100.0)
    assert found["throughput_per_s"] == pytest.approx(300 / spent, abs=1e-2)
    assert found["rows_per_s"] == pytest.approx(4 * 300 / spent, abs=1e-2)
    assert (found["loop"], found["cpu_share"], found["lag_ms"]["p50"], found["warnings"]) == ("open", 0.1, 0.1, [])
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_lost_requests_are_infinitely_slow_in_the_latencies_of_all():
    """6 of 306 without an answer: the p99 of all is none, the p90 is that of a list with 6 infinite ones."""
    taken = np.random.default_rng(1).exponential(20, 300).tolist()
    lost = ["refused", "shed", "shed", "failed", "timed_out", "timed_out"]
    found = figures(samples(taken, lost), OPEN)
    whole = [*taken, *[math.inf] * 6]
    assert found["latency_of_all_ms"] == {
        "p50": pytest.approx(nearest(whole, 50), abs=1e-3),
        "p90": pytest.approx(nearest(whole, 90), abs=1e-3),
        "p99": None,
        "max": None,
    }
    assert found["latency_ms"]["p99"] == pytest.approx(np.percentile(taken, 99), abs=1e-3)
    assert {kind: about["n"] for kind, about in found["errors"].items()} == {"refused": 1, "timed_out": 2, "failed": 1}
    assert found["errors"]["refused"] == {"n": 1, "p50": 50.0, "p90": 50.0, "p99": None, "max": 50.0, "first": "why refused"}
    assert (found["n"], found["answered"], found["shed"]) == (306, 300, 2)
    said = "\n".join(found["warnings"])
    for words in (
        "2 of 306 requests were not sent",
        "refused: 1 of 306 requests, first: why refused",
        "timed out: 2 of 306",
        "failed: 1 of 306",
    ):
        assert words in said


def test_a_p99_needs_200_requests():
    assert figures(samples([1.0] * 199), OPEN)["latency_ms"]["p99"] is None
    assert figures(samples([1.0] * 200), OPEN)["latency_ms"]["p99"] == 1.0


def test_nothing_was_answered():
    found = figures(samples([], ["refused"] * 300), OPEN)
    assert set(found["latency_ms"].values()) == set(found["latency_of_all_ms"].values()) == {None}
    assert (found["throughput_per_s"], found["answered"]) == (0.0, 0)
    assert json.dumps(found, allow_nan=False)


def test_the_generator_as_the_limit():
    busy = samples([5.0] * 300)
    busy.cpu_seconds = 2.7
    late = samples([5.0] * 300)
    late.lag = [0.0] * 290 + [0.0016] * 10
    slow = samples([50.0] * 300)
    slow.lag = [0.0] * 290 + [0.0016] * 10
    assert [one.split(":")[0] for one in figures(busy, OPEN)["warnings"]] == ["the generator used 0.90 of a core"]
    assert [one.split("(")[0] for one in figures(late, OPEN)["warnings"]] == ["the generator was late by 1.6 ms "]
    assert figures(slow, OPEN)["warnings"] == []


def test_a_server_that_does_not_keep_up():
    found = figures(samples([10.0 + 10 * index for index in range(300)]), OPEN)
    assert found["throughput_per_s"] == pytest.approx(300 / 5.99, abs=0.1)
    assert [one[:55] for one in found["warnings"]] == ["50.1 of 100.0 requests/s that were due were answered: t"]


def test_the_table():
    loads = [
        figures(samples([5.0] * 300), OPEN),
        figures(samples([5.0] * 300), Load(concurrency=4, seconds=3.0)),
        figures(samples([], ["shed"]), OPEN),
    ]
    for one in loads:
        assert len(line(one)) == len(header()) == sum(COLUMNS.values())
    assert " ".join(line(loads[0]).split()) == "rate 100 100.0 100.0 100.0 400.0 5.00 5.00 5.00 5.00 0 0 0 0 0.10 10 %"
    assert line(loads[1]).split()[:3] == ["concurrency", "4", "-"]
    assert line(loads[2]).split()[6:10] == ["-"] * 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of the two"),
        ({"rate": 1.0, "concurrency": 1}, "exactly one of the two"),
        ({"rate": 0.0}, r"^rate: 0.0 given; 0.001 to 1000000 is allowed$"),
        ({"rate": math.nan}, "rate: nan given"),
        ({"concurrency": 0}, "concurrency: 0 given"),
        ({"rate": 1.0, "rows": 0}, "rows: 0 given"),
        ({"rate": 1.0, "seconds": math.inf}, "seconds: inf given"),
        ({"rate": 1.0, "timeout_s": 0.0}, "timeout_s: 0.0 given"),
        ({"rate": 1.0, "outstanding": 0}, "outstanding: 0 given"),
        ({"rate": 1.0, "seed": -1}, "seed: -1 given"),
        ({"rate": 1e6, "seconds": 60.0}, f"at most {MOST_REQUESTS} requests"),
    ],
)
def test_loads_that_are_none(given, words):
    with pytest.raises(InputError, match=words):
        Load(**given)
