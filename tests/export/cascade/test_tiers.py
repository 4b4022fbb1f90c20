import numpy as np
import pytest

from export.cascade.path import Seen, fastest_within, path
from export.cascade.tiers import Candidate, best, candidates, faster, named, original
from export.cascade.times import Clock, live_mix, mean_ms
from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.timed import VariantTiming
from tests.problems import raises_problem

KEY = "stages.cascade.tiers"
LENGTHS = np.array([32, 32, 32, 128])


def timing(variant: str, precision: str, engine: str, mode: str, ms: dict[int, float], batch: int = 1) -> list[VariantTiming]:
    """Latency rows by length."""
    names = {"variant": variant, "precision": precision, "float_precision": "fp32", "engine": engine, "mode": mode}
    return [VariantTiming(**names, batch=batch, sequence=length, p50_ms=time * batch) for length, time in ms.items()]  # type: ignore[arg-type]


def build(variant: str, precision: str, *engines: tuple[str, str, bool]) -> Build:
    entries = tuple(Engine(engine=engine, mode=mode, runnable=runs, float_precision="fp32") for engine, mode, runs in engines)
    return Build(variant=variant, precision=precision, float_precision="fp32", folder=f"{variant}-{precision}", engines=entries)


BUILDS = [
    build("baseline", "fp32", ("onnxruntime", "dynamic", True), ("openvino", "static", True), ("torch", "eager", True)),
    build("distill", "fp32", ("openvino", "static", True)),
    build("quantize", "int8", ("openvino", "dynamic", False), ("openvino", "static", True)),
    build("broken", "int8", ("openvino", "dynamic", False)),
]
LATENCY = [
    *timing("baseline", "fp32", "onnxruntime", "dynamic", {32: 4.0, 128: 20.0}),
    *timing("baseline", "fp32", "openvino", "static", {32: 5.0, 128: 8.0}),
    *timing("baseline", "fp32", "torch", "eager", {32: 0.1, 128: 0.1}),
    *timing("distill", "fp32", "openvino", "static", {32: 2.0, 128: 4.0}),
    *timing("quantize", "int8", "openvino", "dynamic", {32: 0.1, 128: 0.1}),
    *timing("quantize", "int8", "openvino", "static", {32: 1.0, 128: 3.0}),
    *timing("quantize", "int8", "openvino", "static", {32: 9.0, 128: 9.0}, batch=8),
]


def found() -> list[Candidate]:
    return candidates(BUILDS, LATENCY, "cpu", LENGTHS)


def test_each_build_answers_in_the_fastest_engine_that_passed_and_is_served() -> None:
    assert [(one.build.variant, one.engine.engine, one.engine.mode) for one in found()] == [
        ("baseline", "openvino", "static"),
        ("distill", "openvino", "static"),
        ("quantize", "openvino", "static"),
    ]
    assert [one.cost_ms for one in found()] == [5.75, 2.5, 1.5]


def test_the_last_tier_is_the_original_in_float() -> None:
    assert original(found(), "baseline", KEY).key == ("baseline", "fp32", "fp32", "openvino", "static")
    with raises_problem(KEY, "quantize", "fp32"):
        original(found(), "quantize", KEY)


def test_named_tiers_stand_in_rising_order_of_cost() -> None:
    last = original(found(), "baseline", KEY)
    assert [one.build.variant for one in named(found(), ["quantize", "distill", "baseline"], last, KEY)] == [
        "quantize",
        "distill",
        "baseline",
    ]
    with raises_problem(KEY, "distill", "2.5 ms", "quantize", "1.5 ms", "rising order"):
        named(found(), ["distill", "quantize", "baseline"], last, KEY)
    with raises_problem(KEY, "prune", "quantize", "all"):
        named(found(), ["prune", "baseline"], last, KEY)


def test_what_is_slower_than_the_original_stands_not_before_it() -> None:
    last = original(found(), "baseline", KEY)
    assert [one.build.variant for one in faster(found(), last, KEY)] == ["quantize", "distill"]
    with raises_problem(KEY, "5.75 ms"):
        faster([last], last, KEY)


@pytest.mark.whole
def test_the_set_with_the_least_time_is_taken() -> None:
    rng = np.random.default_rng(0)
    n, last = 800, original(found(), "baseline", KEY)
    small, middle = faster(found(), last, KEY)
    sure = rng.random(n)
    right, wrong = np.zeros(n, bool), np.ones(n, bool)
    assert best({0: (small, sure, right), 1: (middle, sure, right)}, (last, right), 0.01) == (0,)
    assert best({0: (small, sure, wrong), 1: (middle, sure, right)}, (last, right), 0.01) == (1,)
    other = rng.random(n)  # each is wrong where it is unsure, and they are unsure of different rows
    assert best({0: (small, sure, sure < 0.5), 1: (middle, other, other < 0.3)}, (last, right), 0.01) == (0, 1)


@pytest.mark.parametrize(("allowed", "time_ms"), [(0.0, 1 + 0.5 * 10), (0.25, 1.0)])
def test_a_path_counts_until_other_answers_exceed_what_is_allowed(allowed: float, time_ms: float) -> None:
    wrong = np.array([False, False, True, False])
    seen = Seen([np.array([4.0, 3.0, 2.0, 1.0])], [wrong, np.zeros(4, bool)], [1.0, 10.0])
    assert fastest_within(seen, path(seen), allowed) == time_ms


def test_a_tier_that_saves_no_time_is_not_asked() -> None:
    seen = Seen([np.array([4.0, 3.0, 2.0, 1.0])], [np.array([False, True, True, True]), np.zeros(4, bool)], [9.0, 10.0])
    assert fastest_within(seen, path(seen), 0.0) == 10.0


def test_a_clock_interpolates_between_measured_lengths() -> None:
    clock = Clock.of(
        timing("a", "fp32", "openvino", "static", {32: 1.0, 64: 3.0}) + timing("a", "fp32", "openvino", "static", {32: 9.0}, 8)
    )
    assert clock is not None
    assert [clock.median_ms(length) for length in (16, 32, 48, 64, 128)] == [1.0, 1.0, 2.0, 3.0, 6.0]
    assert mean_ms(clock, np.array([32, 64, 64, 48])) == 2.25
    assert Clock.of([VariantTiming(variant="a", engine="openvino", reason="lost the race")]) is None
    eights = Clock.of(timing("a", "fp32", "openvino", "static", {32: 1.5}, 8))
    assert eights is not None
    assert eights.median_ms(32) == 1.5


def test_times_of_a_mix_are_those_of_the_ways_of_its_rows() -> None:
    first, last = (
        Clock.of(timing("a", "fp32", "openvino", "static", {32: 1.0, 128: 2.0})),
        Clock.of(timing("b", "fp32", "openvino", "static", {32: 10.0, 128: 30.0})),
    )
    assert first is not None
    assert last is not None
    answering = np.array([0, 0, 1, 1])
    mix = live_mix([first, last], [True, True], LENGTHS, answering)
    assert mix.cascade.mean_ms == pytest.approx((1 + 1 + (1 + 10) + (2 + 30)) / 4)
    assert (mix.cascade.p50_ms, mix.cascade.p99_ms) == (pytest.approx(1.0, abs=10.0), 32.0)
    assert [tier.mean_ms for tier in mix.tiers] == [pytest.approx(1.25), pytest.approx(15.0)]
    skipped = live_mix([first, last], [False, True], LENGTHS, np.ones(4, np.int64))
    assert skipped.cascade.mean_ms == pytest.approx(15.0)
    assert skipped.rows == 4


def test_percentiles_have_the_spread_of_the_measured_latency() -> None:
    (row,) = timing("a", "fp32", "openvino", "static", {32: 10.0})
    spread = tuple(np.linspace(10, 10, 20)) + (20.0,)
    clock = Clock.of([row.with_(quantiles_ms=spread)])
    assert clock is not None
    mix = live_mix([clock], [True], np.full(5, 32), np.zeros(5, np.int64))
    assert mix.cascade.p50_ms == pytest.approx(10.0)
    assert mix.cascade.p99_ms is not None
    assert 17 < mix.cascade.p99_ms < 19
