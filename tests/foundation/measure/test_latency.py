import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.machine.load import Watch
from foundation.measure.engine_process import EngineError
from foundation.measure.latency import (
    MAX_SAMPLES,
    MAX_TURNS,
    MIN_SAMPLES,
    REPEATED,
    SHORT_BLOCK,
    SHORT_SECONDS,
    SHORT_TURNS,
    TURNS,
    Cell,
    measure,
)
from foundation.measure.race import BLOCKS, Block
from foundation.measure.samples import Turn
from tests.foundation.scripted_engine import Scripted
from tests.told import Told

pytestmark = pytest.mark.whole


class Still(Watch):
    """A machine that no block is taken again for, or one for which every block would be."""

    def __init__(self, answer: bool = False) -> None:
        super().__init__()
        self.answer = answer

    def disturbed(self) -> bool:
        return self.answer


def asked(log: Path) -> list[dict[str, Any]]:
    return [entry for line in log.read_text().splitlines() if (entry := json.loads(line))["op"] == "measure"]


def test_engines_take_turns_at_every_shape(tmp_path: Path, told: Told) -> None:
    log, shapes = tmp_path / "log", [(1, 8), (2, None)]
    rows = measure([Scripted("a", log), Scripted("b", log)], shapes, told, watch=Still())
    order = [(entry["name"], entry["batch"], entry["sequence"]) for entry in asked(log)]
    assert order == [(name, *shape) for shape in shapes for _ in range(TURNS) for name in ("a", "b")]
    assert [(job, row.engine, row.batch, row.sequence) for job, row in rows] == [
        (index, name, *shape) for index, name in enumerate("ab") for shape in shapes
    ]
    assert told.advanced == len(order) + len(shapes) * (SHORT_TURNS - TURNS), "both bars reach their ends"


@pytest.mark.parametrize(("milliseconds", "count"), [(0.5, MAX_SAMPLES), (14.9, MAX_SAMPLES), (50.0, 60), (1000.0, MIN_SAMPLES)])
def test_at_least_30_samples_then_200_or_3_seconds(tmp_path: Path, told: Told, milliseconds: float, count: int) -> None:
    ((_, row),) = measure([Scripted("a", tmp_path / "log", milliseconds)], [(4, 8)], told, watch=Still())
    assert row.n == pytest.approx(count, abs=TURNS)
    assert (row.p99_ms is None) == (row.n < MAX_SAMPLES)
    assert row.throughput_per_s == pytest.approx(4 * 1e3 / milliseconds, rel=1e-3)
    assert all(entry["least"] == MIN_SAMPLES / TURNS for entry in asked(tmp_path / "log")[:1])


def test_figures_are_those_of_the_samples(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).gamma(2.0, 3.0, 210)
    cell = Cell()
    cell.turns = [Turn(samples[start : start + 70]) for start in (0, 70, 140)]
    row = cell.row(Scripted("a", tmp_path / "log"), (2, 8))
    ordered = sorted(samples)
    for key, share in (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99)):
        place = share * (len(ordered) - 1)
        low = int(place)
        assert getattr(row, key) == pytest.approx(ordered[low] + (place - low) * (ordered[low + 1] - ordered[low]), abs=1e-4)
    assert (row.n, row.throughput_per_s) == (210, pytest.approx(2 * 210 / (samples.sum() / 1e3), rel=1e-4))
    quantiles = row.quantiles_ms
    assert list(quantiles) == sorted(quantiles)
    assert (len(quantiles), quantiles[10], quantiles[18]) == (21, row.p50_ms, row.p90_ms)
    assert quantiles[0] == pytest.approx(ordered[0], abs=1e-4)


def test_the_row_has_the_keys_of_the_report(tmp_path: Path, told: Told) -> None:
    ((_, row),) = measure([Scripted("a", tmp_path / "log", threads=3)], [(1, 8)], told, watch=Still())
    wanted = "engine mode precision float_precision device threads batch sequence p50_ms p90_ms p99_ms throughput_per_s n"
    assert set(wanted.split()) <= row.written().keys()
    assert (row.threads, row.peak_memory_bytes) == (3, 12345)
    assert (row.device, row.provider, row.float_precision) == ("cpu", "played", "fp32")


def test_an_engine_that_fails_stops_the_measurement(tmp_path: Path, told: Told) -> None:
    with pytest.raises(EngineError, match="unopenable"):
        measure([Scripted("a", tmp_path / "log"), Scripted("unopenable", tmp_path / "log")], [(1, 8)], told, watch=Still())


def test_a_spoiled_block_is_taken_again_a_bounded_number_of_times(tmp_path: Path, told: Told) -> None:
    log, watch = tmp_path / "log", Still(True)
    shapes = [(1, length) for length in (8, 16, 32, 64)]
    rows = measure([Scripted("a", log), Scripted("b", log)], shapes, told, watch=watch)
    assert watch.repeated == REPEATED * len(rows)
    assert len(asked(log)) == len(rows) * TURNS + watch.repeated


def test_only_wide_intervals_and_what_they_are_compared_with_take_more_turns(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, asked_of = tmp_path / "log", list[str]()
    steady = {name: itertools.repeat(median) for name, median in (("reference", 5.0), ("quiet", 3.0), ("fast", 1.0))}
    medians: dict[str, Iterator[float]] = {**steady, "noisy": itertools.cycle([2.0, 4.0])}

    def ask(self: Cell, process: Any, *given: object) -> Turn:
        asked_of.append(process.job.name)
        return Turn(np.full(900, next(medians[process.job.name])))

    monkeypatch.setattr(Cell, "ask", ask)
    rows = measure([Scripted(name, log) for name in medians], [(1, 8)], told, watch=Still())
    turns = {row.engine: len(row.turns_ms) for _, row in rows}
    assert turns == {"reference": MAX_TURNS, "noisy": MAX_TURNS, "quiet": TURNS, "fast": MAX_TURNS}
    assert len(asked_of) == sum(turns.values())


def test_a_wide_interval_takes_more_turns(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    medians = iter([1.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    monkeypatch.setattr(Cell, "ask", lambda *_: Turn(np.full(900, next(medians))))
    ((_, row),) = measure([Scripted("a", tmp_path / "log")], [(1, 8)], told, watch=Still())
    assert len(row.turns_ms) == MAX_TURNS
    assert row.busy is True
    assert row.interval_ms[0] < row.p50_ms < row.interval_ms[1]


@pytest.mark.parametrize(("spread", "expected"), [(0.0, TURNS), (0.02, TURNS), (0.5, SHORT_TURNS)])
def test_short_calls_take_turns_until_their_interval_is_narrow(
    spread: float, expected: int, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    medians = itertools.cycle([0.1, 0.1 * (1 + spread)])
    monkeypatch.setattr(Cell, "ask", lambda *_: Turn(np.full(9, next(medians))))
    ((_, row),) = measure([Scripted("a", tmp_path / "log")], [(1, 8)], told, watch=Still())
    assert len(row.turns_ms) == expected


def test_late_turns_of_short_calls_are_short(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    medians, most = itertools.cycle([0.1, 0.2]), list[int]()

    def ask(self: Cell, process: object, shape: object, block: Block) -> Turn:
        most.append(block.most)
        return Turn(np.full(9, next(medians)))

    monkeypatch.setattr(Cell, "ask", ask)
    measure([Scripted("a", tmp_path / "log")], [(1, 8)], told, watch=Still())
    assert most[TURNS:] == [BLOCKS[-1].most] * (MAX_TURNS - TURNS) + [SHORT_BLOCK.most] * (SHORT_TURNS - MAX_TURNS)


def test_the_reference_takes_no_part_in_the_turns_of_short_calls(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    medians = {"reference": itertools.repeat(5.0), "noisy": itertools.cycle([0.2, 0.4]), "fast": itertools.repeat(0.1)}
    monkeypatch.setattr(Cell, "ask", lambda self, process, *_: Turn(np.full(9, next(medians[process.job.name]))))
    rows = measure([Scripted(name, log) for name in medians], [(1, 8)], told, watch=Still())
    assert {row.engine: len(row.turns_ms) for _, row in rows} == {"reference": MAX_TURNS, "noisy": SHORT_TURNS, "fast": SHORT_TURNS}


def test_short_calls_end_when_they_have_taken_their_time(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    medians = itertools.cycle([1.0, 1.2])
    monkeypatch.setattr(Cell, "ask", lambda *_: Turn(np.full(200, next(medians))))
    ((_, row),) = measure([Scripted("a", tmp_path / "log")], [(1, 8)], told, watch=Still())
    assert sum(200 * one / 1e3 for one in row.turns_ms[:-1] if one) < SHORT_SECONDS <= sum(200 * one / 1e3 for one in row.turns_ms if one)
