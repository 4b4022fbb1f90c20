"""The choice of what is served, against a written-out search and by its properties."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.artifacts.artifact import write_json
from foundation.artifacts.exported import Build, Engine, Exported
from foundation.artifacts.timed import VariantTiming, write_latency
from foundation.core.goals import Goals
from foundation.measure.fastest import (
    CLOSE,
    NEGLIGIBLE_MS,
    Candidate,
    Measured,
    Scale,
    candidates,
    competing,
    fastest,
    missed,
    ranking,
    time_ms,
)
from foundation.measure.judged import judged_of

SHAPES = ((1, 32), (8, 128))


def row(p50: float, batch: int = 1, sequence: int | None = 32, **more: Any) -> VariantTiming:
    settings = {"throughput_per_s": 1000 * batch / p50, "turns_ms": [p50] * 3, **more}
    return VariantTiming(batch=batch, sequence=sequence, p50_ms=p50, p99_ms=None, **settings)


def candidate(times: tuple[float, ...], metric: float = 0.9, size: int = 10_000_000, name: str = "a") -> Candidate:
    rows = {shape: row(p50, *shape) for shape, p50 in zip(SHAPES, times, strict=True)}
    return Candidate((name, "int8", "fp32", "openvino", "static"), metric, size, rows)


def scale(*times: float) -> Scale:
    return Scale("accuracy", 0.9, {shape: row(p50, *shape) for shape, p50 in zip(SHAPES, times, strict=False)})


def test_the_time_is_the_geometric_mean_over_the_shapes() -> None:
    assert time_ms(candidate((2.0, 8.0)), Goals()) == pytest.approx(4.0)
    assert time_ms(candidate((4.0, 4.0)), Goals()) == pytest.approx(4.0)


def test_a_limit_on_latency_is_what_the_time_is_of() -> None:
    goals = Goals.model_validate({"max_latency_ms": [{"batch": 8, "sequence": 128, "value": 9}]})
    assert time_ms(candidate((100.0, 8.0)), goals) == pytest.approx(8.0)
    assert missed(candidate((100.0, 8.0)), goals, scale()) == ()
    assert missed(candidate((1.0, 9.5)), goals, scale()) == ("max_latency_ms",)


def test_a_percentile_that_was_not_measured_is_missed_only_where_a_lower_one_exceeds_its_limit() -> None:
    goals = Goals.model_validate({"max_latency_ms": [{"percentile": 99, "sequence": 32, "value": 9}]})
    assert missed(candidate((8.0, 1.0)), goals, scale()) == ()
    assert missed(candidate((9.5, 1.0)), goals, scale()) == ("max_latency_ms",)


def test_all_are_ordered_by_the_highest_percentile_that_all_have() -> None:
    slow, fast = candidate((8.0, 1.0), name="slow"), candidate((7.0, 1.0), name="fast")
    fast = replace(fast, rows={**fast.rows, (1, 32): fast.rows[1, 32].with_(p99_ms=8.5)})
    goals = Goals.model_validate({"max_latency_ms": [{"percentile": 99, "sequence": 32, "value": 9}]})
    assert [(one.candidate.key[0], one.time_ms) for one in ranking([slow, fast], goals, scale())] == [
        ("fast", pytest.approx(7.0)),
        ("slow", pytest.approx(8.0)),
    ]


def test_a_limit_on_a_shape_that_was_not_measured_orders_nothing() -> None:
    goals = Goals.model_validate({"max_latency_ms": [{"value": 9}]})  # as in a run of an earlier version
    ranked = ranking([candidate((8.0, 2.0)), candidate((1.0, 4.0))], goals, scale())
    assert [(one.time_ms, one.missed) for one in ranked] == [(pytest.approx(2.0), ()), (pytest.approx(4.0), ())]


def test_a_goal_of_throughput_orders_by_throughput() -> None:
    goals = Goals(min_throughput=1)
    slow_alone, fast_in_batches = candidate((1.0, 100.0)), candidate((2.0, 4.0))
    assert time_ms(slow_alone, goals) == pytest.approx(1.0)  # 1,000 rows a second
    assert time_ms(fast_in_batches, goals) == pytest.approx(0.5)  # 8 rows in 4 ms


@pytest.mark.parametrize(
    ("goals", "judged"),
    [
        ({"max_drop": 0.01}, candidate((1, 1), metric=0.889)),
        ({"min_speedup": 3.1}, candidate((1, 4))),  # 10 / 1, 12 / 4
        ({"max_size_mb": 9.9}, candidate((1, 1))),
        ({"min_throughput": 1001}, candidate((1, 8))),
    ],
)
def test_each_goal_can_be_missed(goals: dict[str, float], judged: Candidate) -> None:
    [name] = goals
    assert missed(judged, Goals.model_validate(goals), scale(10, 12)) == (name,)
    met = {"max_drop": 0.012, "min_speedup": 3.0, "max_size_mb": 10.0, "min_throughput": 1000}[name]
    assert missed(judged, Goals.model_validate({name: met}), scale(10, 12)) == ()


def test_float_is_served_where_int8_loses_and_accuracy_comes_before_speed() -> None:
    int8, floating = candidate((2.3, 2.3), name="int8"), candidate((1.9, 1.9), name="float")
    assert ranking([int8, floating], Goals(), scale())[0].candidate is floating
    wrong = candidate((1.0, 1.0), metric=0.8, name="wrong")
    assert ranking([wrong, int8, floating], Goals(max_drop=0.01), scale())[0].candidate is floating
    assert ranking([wrong, int8, floating], Goals(), scale())[0].candidate is wrong


def test_equally_fast_ones_are_chosen_by_size() -> None:
    large, small = candidate((1.0, 1.0), size=30), candidate((1.0 + CLOSE / 2, 1.0), size=10)
    assert ranking([large, small], Goals(), scale())[0].candidate is small
    small = candidate((1.0 + 3 * CLOSE, 1.0 + 3 * CLOSE), size=10)
    assert ranking([large, small], Goals(), scale())[0].candidate is large


@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.1, 50), st.floats(0.7, 1.0), st.integers(1, 100)), min_size=1, max_size=8),
    st.sampled_from([{}, {"max_drop": 0.02}, {"max_drop": 0.02, "min_speedup": 2.0}, {"max_size_mb": 0.00005, "min_throughput": 300}]),
)
def test_no_other_candidate_misses_fewer_goals_or_is_clearly_faster(
    drawn: list[tuple[float, float, float, int]], given_goals: dict[str, float]
) -> None:
    goals, against = Goals.model_validate(given_goals), scale(20, 40)
    found = [candidate((one, eight), metric, size) for one, eight, metric, size in drawn]
    ranked = ranking(found, goals, against)
    assert sorted(map(id, found)) == sorted(id(one.candidate) for one in ranked)
    first = ranked[0]
    least = min(len(missed(one, goals, against)) for one in found)
    assert len(first.missed) == least
    rivals = [one for one in found if len(missed(one, goals, against)) == least]
    best = min(time_ms(one, goals) for one in rivals)
    assert first.time_ms <= equal(best, goals)
    smaller = [one for one in rivals if one.size_bytes < first.candidate.size_bytes]
    assert all(time_ms(one, goals) > equal(best, goals) for one in smaller)


def equal(best: float, goals: Goals) -> float:
    """Returns the longest time that is as fast as the least one."""
    return max((1 + CLOSE) * best, best + (0.0 if goals.min_throughput else NEGLIGIBLE_MS))


@pytest.mark.parametrize(
    ("slower", "served"),
    [(0.226, "fast"), (0.1554, "small"), (0.1804, "small")],
    ids=["a half slower", "a thirtieth slower", "30 microseconds slower"],
)
def test_calls_of_a_fraction_of_a_millisecond_give_the_same_choice_in_every_run(slower: float, served: str) -> None:
    """One turn in seven takes a quarter longer, as turns of a small ViT in OpenVINO do on two quiet cores."""
    chosen = []
    for seed in range(200):
        random = np.random.default_rng(seed)
        found = []
        for name, quiet, size in (("fast", 0.1504, 20), ("small", slower, 10)):
            turns = quiet * np.exp(random.normal(0, 0.02, 6)) * np.where(random.random(6) < (0.15 if name == "fast" else 0), 1.25, 1)
            cell = row(float(np.median(turns)), turns_ms=tuple(turns))
            found.append(Candidate((name, "int8", "fp32", "openvino", "static"), 0.9, size, {(1, 32): cell}))
        chosen.append(ranking(found, Goals(), scale(1.0))[0].candidate.key[0])
    assert chosen.count(served) >= 185


def build(variant: str, precision: str, *engines: Engine) -> Build:
    rest = "bf16" if precision == "bf16" else "fp32"
    return Build(variant=variant, precision=precision, float_precision=rest, engines=engines)


def entry(engine: str, mode: str, metric: float = 0.9, **more: Any) -> Engine:
    settings = {"runnable": True, "size_bytes": 5, "float_precision": "fp32", **more}
    return Engine(engine=engine, mode=mode, metrics={"accuracy": metric}, **settings)


def timed(variant: str, precision: str, engine: str, mode: str, p50: float, rest: str = "fp32") -> VariantTiming:
    return row(p50, variant=variant, precision=precision, float_precision=rest, engine=engine, mode=mode)


def test_the_last_variant_competes_with_the_float_one_that_it_was_made_of() -> None:
    builds = [build("baseline", "fp32"), build("distil", "fp32"), build("distil", "bf16"), build("quantize", "int8")]
    assert competing(builds, ["baseline", "distil", "quantize"]) == ["quantize", "distil"]
    assert competing(builds[:1] + builds[-1:], ["baseline", "distil", "quantize"]) == ["quantize", "baseline"]
    assert competing(builds[:2], ["baseline", "distil"]) == ["distil"]


def test_a_model_without_adapters_does_not_compete_with_one_that_has_some() -> None:
    named = {"adapters": ("legal", "medical")}
    builds = [build("baseline", "fp32"), build("quantize", "int8"), build("adapters", "int8").with_(**named)]
    assert competing(builds, ["baseline", "quantize", "adapters"]) == ["adapters"]
    floating = [build("baseline", "fp32"), build("adapters", "fp32").with_(**named)]
    assert competing(floating, ["baseline", "adapters"]) == ["adapters"]


def test_only_what_runs_was_timed_and_can_be_served_competes() -> None:
    builds = [
        build("a", "int8", entry("openvino", "static"), entry("openvino", "dynamic", runnable=False), entry("tensorrt", "static")),
        build("a", "int8", entry("onnxruntime", "dynamic")),
        build("b", "fp32", entry("openvino", "static")),
    ]
    latency = [
        timed("a", "int8", "openvino", "static", 1.0),
        timed("a", "int8", "openvino", "dynamic", 1.0),
        timed("a", "int8", "tensorrt", "static", 1.0),
        timed("b", "fp32", "openvino", "static", 1.0),
    ]
    found = candidates(builds, latency, ["a"], lambda engine: engine.figures["accuracy"])
    assert [one.key for one in found] == [("a", "int8", "fp32", "openvino", "static")]


def test_a_float_part_in_bf16_is_a_configuration_of_its_own(tmp_path: Path) -> None:
    builds = [
        build("baseline", "fp32", entry("openvino", "static", 0.95)),
        build("quantize", "int8", entry("openvino", "static", 0.94), entry("openvino", "static", 0.93, float_precision="bf16")),
    ]
    latency = [
        timed("baseline", "fp32", "torch", "eager", 20.0),
        timed("baseline", "fp32", "openvino", "static", 5.0),
        timed("quantize", "int8", "openvino", "static", 2.0),
        timed("quantize", "int8", "openvino", "static", 1.0, "bf16"),
    ]
    write_json(tmp_path / "export.json", Exported(builds=builds).written())
    write_latency(tmp_path, latency)
    measured = Measured(tmp_path, tmp_path, ["baseline", "quantize"], "baseline", 0.95)
    judged = judged_of("text-classification", None, ())
    assert [one.candidate.key[2] for one in fastest(measured, Goals(), judged)] == ["bf16", "fp32", "fp32"]
    first = fastest(measured, Goals(max_drop=0.015), judged)[0]
    assert (first.candidate.names["float_precision"], first.candidate.metric) == ("fp32", 0.94)
    assert fastest(measured, Goals(min_speedup=15), judged)[0].missed == ()


def configuration(precision: str, rest: str, mode: str, size: int, seed: int, factor: float, noise: float) -> Candidate:
    """Takes three turns; `noise` is the standard deviation of a turn's median."""
    random = np.random.default_rng(seed)
    rows = {}
    for shape, quiet in zip(SHAPES * 2, (2.0, 20.0), strict=False):
        turns = [quiet * factor * math.exp(random.normal(0, noise)) for _ in range(3)]
        rows[shape] = row(sorted(turns)[1], *shape, turns_ms=turns)
    return Candidate(("quantize", precision, rest, "openvino", mode), 0.9, size, rows)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_ten_noisy_measurements_of_one_network_choose_alike(noise: float) -> None:
    """The mixed one is 2 % faster and larger, the dynamic one 2 % slower and simpler; which is the fastest noise decides."""
    chosen, fastest_ones = set(), set()
    for repetition in range(10):
        drawn = [
            configuration("int8", "bf16", "static", 59_600_000, 10 * repetition, 0.98, noise),
            configuration("int8", "fp32", "static", 35_800_000, 10 * repetition + 1, 1.0, noise),
            configuration("int8", "fp32", "dynamic", 35_800_100, 10 * repetition + 2, 1.02, noise),
            configuration("int8", "fp32", "compiled", 20_000_000, 10 * repetition + 3, 1.6, noise),
            configuration("fp32", "fp32", "static", 120_000_000, 10 * repetition + 4, 2.5, noise),
        ]
        chosen.add(ranking(drawn, Goals(), scale())[0].candidate.key)
        fastest_ones.add(min(drawn, key=lambda one: time_ms(one, Goals())).key)
    assert chosen == {("quantize", "int8", "fp32", "openvino", "dynamic")}
    assert len(fastest_ones) > 1 or noise < 0.02, "the fastest is not the same every time"


def test_one_precision_comes_before_two_of_the_same_size() -> None:
    mixed = configuration("int8", "bf16", "dynamic", 10_000_000, 0, 1.0, 0.001)
    plain = configuration("int8", "fp32", "static", 10_000_000, 1, 1.01, 0.001)
    assert ranking([mixed, plain], Goals(), scale())[0].candidate is plain


def test_a_wide_interval_makes_nothing_equal_that_is_far() -> None:
    quick, small = (configuration("int8", "fp32", "static", size, 0, 1.0, 0.0) for size in (20_000_000, 10_000_000))
    slower = {}
    for shape, row in small.rows.items():
        middle = row.median_ms
        slower[shape] = row.with_(p50_ms=1.3 * middle, turns_ms=tuple(factor * 1.3 * middle for factor in (0.7, 1.3, 2.0)))
    small = replace(small, rows=slower)
    assert ranking([quick, small], Goals(), scale())[0].candidate is quick


def test_rows_without_turns_are_ranked_as_they_were_when_the_run_was_made() -> None:
    """What an earlier version chose is what lies in the repository of its run."""
    large, small = candidate((1.0, 1.0), size=30), candidate((1.03, 1.03), size=10)
    assert ranking([large, small], Goals(), scale())[0].candidate is small
    large, small = (replace(one, rows={shape: row.with_(turns_ms=()) for shape, row in one.rows.items()}) for one in (large, small))
    assert ranking([large, small], Goals(), scale())[0].candidate is large
