"""How busy the machine was, from counters that are written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foundation.machine import load
from foundation.machine.load import Snapshot, Watch

START = Snapshot(wall=100.0, busy=50.0, stolen=0.0, throttled=0.0, pressure=0.0, own=10.0)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(load, "snapshot", lambda: START)
    monkeypatch.setattr(load, "calibrate", lambda: 1.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return Watch()


def test_other_cores_are_what_this_process_did_not_take(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    end = replace(START, wall=110.0, busy=69.0, stolen=1.0, pressure=4.0, own=24.0)
    monkeypatch.setattr(load, "snapshot", lambda: end)
    found = watch.summary()
    assert (found["other_cores"], found["stolen"], found["pressure"], found["throttled_s"]) == (0.5, 0.05, 0.4, 0.0)
    assert (found["seconds"], found["calibration_ms"], found["calibration_spread"]) == (10.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "spoiled"),
    [({}, False), ({"stolen": 0.05}, False), ({"stolen": 0.2}, True), ({"throttled": 0.1}, True), ({"stolen": None}, False)],
)
def test_stolen_and_throttled_time_spoil_a_block(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, change: dict[str, float | None], spoiled: bool
) -> None:
    monkeypatch.setattr(load, "snapshot", lambda: replace(START, wall=101.0, **change))
    assert watch.disturbed() is spoiled
    assert watch.disturbed() is False, "only since the last call"


def test_a_slow_machine_spoils_a_block_between_two_slow_kernels(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.4, 1.4, 1.0])
    monkeypatch.setattr(load, "calibrate", lambda: next(times))
    assert [watch.disturbed() for _ in range(4)] == [False, False, True, False]


def test_this_machine_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Watch().summary()
    assert found["other_cores"] is not None
    assert found["calibration_ms"] > 0
    assert len(found["load_average"]) == 3
