"""Engines that cannot win leave early: the same winner in a third of the time, on a simulated machine."""

from __future__ import annotations

import math

import pytest

from foundation.artifacts.timed import Timing
from foundation.measure.latency import TURNS, measure
from foundation.measure.race import BLOCKS, Race, Rival
from tests.foundation.measure.test_samples import Still
from tests.foundation.simulated_engines import Machine, Simulated
from tests.foundation.simulated_engines import Process as SimulatedProcess
from tests.told import Told

pytestmark = pytest.mark.whole

SHAPES: list[tuple[int, int | None]] = [(batch, length) for batch in (1, 8) for length in (16, 32, 128)]
ENGINES = {"torch": 12.0, "torch bf16": 30.0, "float": 5.0, "float bf16": 4.5, "int8": 1.0, "int8 near": 1.04, "int8 halves": 1.1} | {
    f"slow {number}": 2.0 + number / 4 for number in range(14)
}
"""Relative times of 21 engines; the first is the reference."""
GROUPS = {"torch": "reference", "torch bf16": "float", "float": "float", "float bf16": "float bf16", "int8 halves": "int8 bf16"}


def run(race: Race | None, seed: int = 0) -> tuple[list[Timing], Machine]:
    machine = Machine(seed=seed)
    work = {shape: 0.02 * shape[0] * (shape[1] or 1) ** 1.05 for shape in SHAPES}
    jobs = [Simulated(name, {shape: factor * work[shape] for shape in SHAPES}, machine) for name, factor in ENGINES.items()]
    return [row for _, row in measure(jobs, SHAPES, Told(), race, Still())], machine  # type: ignore[arg-type]


def winner(rows: list[Timing]) -> str:
    return min(ENGINES, key=lambda name: sum(math.log(row.median_ms) for row in rows if row.engine == name))


def test_the_same_winner_in_a_third_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.EngineProcess", SimulatedProcess)
    race = Race([Rival(GROUPS.get(name, "int8"), always=number == 0) for number, name in enumerate(ENGINES)])
    (whole, long), (rows, short) = run(None), run(race)
    assert winner(rows) == winner(whole) == "int8"
    assert short.spent_ms < long.spent_ms / 3
    assert [(row.engine, row.shape) for row in rows] == [(row.engine, row.shape) for row in whole]
    turns = {name: {len(row.turns_ms) for row in rows if row.engine == name} for name in ENGINES}
    kept = {"torch", "float", "float bf16", "int8", "int8 near", "int8 halves"}
    assert all(min(turns[name]) >= TURNS for name in kept), "the reference, the fastest of each group, and what is not apart"
    assert all(turns[name] == {1} for name in ENGINES if name not in kept)
    for row in rows:
        assert row.n >= BLOCKS[0].least
        assert row.interval_ms[0] <= row.p50_ms <= row.interval_ms[1]


@pytest.mark.parametrize(("wider", "turns"), [("torch", {1}), (None, {TURNS, TURNS + 1, TURNS + 2, TURNS + 3})])
def test_a_narrower_precision_that_is_slower_leaves(wider: str | None, turns: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.EngineProcess", SimulatedProcess)
    machine = Machine()
    jobs = [Simulated(name, dict.fromkeys(SHAPES, time), machine) for name, time in (("torch", 12.0), ("torch bf16", 40.0), ("int8", 3.0))]
    race = Race([Rival("torch", always=True), Rival("torch bf16", wider=wider), Rival("int8")])
    rows = [row for _, row in measure(jobs, SHAPES, Told(), race, Still())]  # type: ignore[arg-type]
    assert {len(row.turns_ms) for row in rows if row.engine == "torch bf16"} <= turns
    assert all(len(row.turns_ms) >= TURNS for row in rows if row.engine in ("torch", "int8"))


def test_a_narrower_precision_that_is_faster_at_one_shape_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.EngineProcess", SimulatedProcess)
    machine = Machine()
    wide = Simulated("fp32", dict.fromkeys(SHAPES, 10.0), machine)
    narrow = Simulated("bf16", {shape: 8.0 if shape == SHAPES[0] else 30.0 for shape in SHAPES}, machine)
    rows = measure([wide, narrow], SHAPES, Told(), Race([Rival("fp32", always=True), Rival("bf16", wider="fp32")]), Still())  # type: ignore[list-item]
    assert all(len(row.turns_ms) >= TURNS for _, row in rows)


def test_what_is_faster_at_one_shape_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.EngineProcess", SimulatedProcess)
    machine = Machine()
    fast = Simulated("fast", dict.fromkeys(SHAPES, 1.0), machine)
    odd = Simulated("odd", {shape: 0.8 if shape == SHAPES[2] else 3.0 for shape in SHAPES}, machine)
    rows = measure([fast, odd], SHAPES, Told(), Race([Rival("int8"), Rival("int8")]), Still())  # type: ignore[list-item]
    assert all(len(row.turns_ms) >= TURNS for _, row in rows)


@pytest.mark.parametrize("load", [1.0, 4.0])
def test_far_slower_engines_leave_a_busy_machine_too(load: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.EngineProcess", SimulatedProcess)
    times = {"reference": 40.0, "fast": 4.0, "near": 4.4, "slow": 60.0, "slowest": 200.0}
    machine = Machine(load=load)
    jobs = [Simulated(name, dict.fromkeys(SHAPES, time), machine, spins=0.5) for name, time in times.items()]
    race = Race([Rival("torch", always=True), *[Rival("int8")] * 4])
    rows = [row for _, row in measure(jobs, SHAPES, Told(), race, Still())]  # type: ignore[arg-type]
    assert any(row.busy for row in rows)
    turns = {name: max(len(row.turns_ms) for row in rows if row.engine == name) for name in times}
    assert turns["slow"] == turns["slowest"] == 1
    assert min(turns["reference"], turns["fast"], turns["near"]) >= TURNS


def test_a_goal_on_the_p99_takes_200_samples_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.EngineProcess", SimulatedProcess)
    job = Simulated("a", dict.fromkeys(SHAPES, 12.0), Machine())
    rows = measure([job], SHAPES, Told(), Race([Rival("int8")], frozenset({SHAPES[0]})), Still())  # type: ignore[list-item]
    assert [row.p99_ms is not None for _, row in rows] == [True] + [False] * 5
