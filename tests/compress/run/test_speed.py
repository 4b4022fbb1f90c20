"""The calibration of the machine: kept, and made again where it no longer holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress.run import speed as module
from compress.run.speed import Speed, measured, speed


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr("foundation.machine.cached.cache_folder", lambda: tmp_path / "compress")
    return []


def idle() -> float:
    return 0.0


def counting(asked: list[int]) -> Any:
    def measure(threads: int) -> Speed:
        asked.append(threads)
        return Speed(1e10 * threads, 2e10 * threads, 0.02, 1e9)

    return measure


def test_it_is_measured_once(asked: list[int]) -> None:
    first, second = (speed(2, counting(asked), idle) for _ in range(2))
    assert first == second == Speed(2e10, 4e10, 0.02, 1e9)
    assert asked == [2]


def test_it_is_measured_again_for_other_threads_libraries_and_processors(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    speed(2, counting(asked), idle)
    speed(1, counting(asked), idle)
    monkeypatch.setattr(module, "versions", lambda: {"torch": "9.9"})
    speed(2, counting(asked), idle)
    known = module.processor()
    monkeypatch.setattr(module, "processor", lambda: {**known, "cpu": "another"})
    speed(2, counting(asked), idle)
    assert asked == [2, 1, 2, 2]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"macs_per_s": 0, "trained_per_s": 1, "python_s": 1, "written_per_s": 1}', '{"macs_per_s": "x"}', "[1]"]
)
def test_a_damaged_file_is_measured_again(text: str, asked: list[int], tmp_path: Path) -> None:
    speed(2, counting(asked), idle)
    (file,) = (tmp_path / "compress" / "speed").iterdir()
    file.write_text(text)
    assert speed(2, counting(asked), idle).macs_per_s == 2e10
    assert asked == [2, 2]


@pytest.mark.whole
def test_what_is_measured_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEATS", 1)
    found = measured(1)
    assert min(found.macs_per_s, found.trained_per_s, found.python_s, found.written_per_s) > 0


def test_a_busy_machine_is_measured_again_and_the_best_is_kept(asked: list[int]) -> None:
    found = iter([Speed(1e10, 3e10, 0.05, 1e9), Speed(2e10, 2e10, 0.08, 5e8), Speed(1.5e10, 2e10, 0.03, 2e9)])

    def measure(threads: int) -> Speed:
        asked.append(threads)
        return next(found)

    loads = [3.0, 3.0, 0.1]
    speeds = [speed(2, measure, lambda load=load: load) for load in loads]
    assert speeds == [Speed(1e10, 3e10, 0.05, 1e9), Speed(2e10, 3e10, 0.05, 1e9), Speed(2e10, 3e10, 0.03, 2e9)]
    assert speed(2, measure, idle) == speeds[-1]
    assert len(asked) == 3
