"""Speeds of engines that answer prompts: what is counted, and from where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from compress.run.bandwidth import read_bandwidth
from foundation.artifacts.timed import Speed
from foundation.core.decoding import Answer, Decoding
from foundation.core.progress import ConsoleProgress
from foundation.measure import generation
from foundation.measure.generation import (
    LONG,
    LONG_TURNS,
    MIN_FOR_P99,
    TURNS,
    Reads,
    Workload,
    bandwidth_share,
    measure_cells,
    measure_generation,
    percentiles,
    workloads,
)


@dataclass
class Job:
    name: str
    token_ms: float
    threads: int = 2

    @property
    def labels(self) -> dict[str, str]:
        return {"engine": self.name, "mode": "paged", "precision": "int8", "float_precision": "fp32", "device": "cpu"}


@dataclass
class Process:
    """An engine whose first token takes 10 ms and each other `token_ms`; a stream starts 1 ms after the one before."""

    job: Job
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    peak_memory_bytes: int = 1000

    def generate(self, prompts: list[np.ndarray], decoding: Decoding) -> list[Answer]:
        assert decoding.ignore_end
        ORDER.append(self.job.name)
        self.asked.append((len(prompts), len(prompts[0]), decoding.max_tokens))
        steps = range(decoding.max_tokens)
        seconds = [tuple((10 + stream + self.job.token_ms * step) / 1e3 for step in steps) for stream in range(len(prompts))]
        return [Answer((tuple(steps),), times) for times in seconds]


ORDER: list[str] = []
OPEN: list[Process] = []


@contextmanager
def opened(job: Job) -> Iterator[Process]:
    OPEN.append(Process(job))
    yield OPEN[-1]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Speed]]:
    ORDER.clear()
    OPEN.clear()
    monkeypatch.setattr(generation, "EngineProcess", opened)
    jobs, reads = [Job("a", 2.0), Job("b", 4.0)], [Reads(10**6, 100), Reads(4 * 10**6, 100)]
    loads = [Workload(32, 1, 64), Workload(32, 4, 64)]
    return measure_generation(jobs, reads, loads, 50, 1e9, ConsoleProgress("silent"))  # type: ignore[arg-type]


def test_engines_take_turns_and_every_load_is_warmed_up(rows: list[tuple[int, Speed]]) -> None:
    assert ["a", "a", "b", "b", *["a", "b"] * 3, "a", "a", "b", "b", *["a", "b"] * 2] == ORDER
    assert OPEN[0].asked == [(1, 32, 4), *[(1, 32, 64)] * 4, (4, 32, 4), *[(4, 32, 64)] * 3]


def test_times_and_rates_are_those_of_the_tokens(rows: list[tuple[int, Speed]]) -> None:
    alone, four = rows[0][1], rows[1][1]
    assert [(job, row.streams) for job, row in rows] == [(0, 1), (0, 4), (1, 1), (1, 4)]
    assert alone.token_ms.p50 == pytest.approx(2)
    assert alone.first_token_ms.written() == {"p50": pytest.approx(10), "p90": pytest.approx(10), "p99": None}
    assert alone.n == 4 * 63
    assert alone.token_ms.p99 == pytest.approx(2)
    assert four.n == 3 * 4 * 63
    assert four.token_ms.p99 == pytest.approx(2)
    assert alone.tokens_per_s == pytest.approx(64 / 0.136, rel=1e-4)
    assert four.tokens_per_s == pytest.approx(4 * 64 / 0.139, rel=1e-4)  # the last stream is ready 3 ms later
    assert four.first_token_ms.p50 == pytest.approx(11.5)
    assert rows[2][1].token_ms.p50 == pytest.approx(4)


def test_bandwidth_counts_weights_and_half_of_the_cache(rows: list[tuple[int, Speed]]) -> None:
    expected = (10**6 + (32 + 32) * 100) / 2e-3 / 1e9
    assert rows[0][1].bandwidth_share == pytest.approx(expected, abs=1e-4)
    assert rows[1][1].bandwidth_share is None  # several streams share what is read
    assert bandwidth_share(Reads(1, 1), Workload(1, 1, 1), None, 1e9) is None


def test_loads_fit_into_what_the_model_reads() -> None:
    assert {(load.prompt_tokens, load.tokens) for load in workloads(None)} == {(32, 64), (512, 64)}
    assert {(load.prompt_tokens, load.tokens) for load in workloads(128)} == {(32, 63), (65, 63)}
    assert [(load.prompt_tokens, load.streams) for load in workloads(None)] == [(32, 1), (32, 4), (32, 8), (512, 1), (512, 8)]
    assert [load.streams for load in workloads(8)] == [1, 4, 8]  # both lengths are shortened to one
    for longest in (8, 16, 40, 100, 575, 576, 600):
        for load in workloads(longest):
            assert load.prompt_tokens >= 1
            assert load.tokens >= 1
            assert load.prompt_tokens + load.tokens <= longest


def test_every_load_has_enough_times_between_tokens_for_p99() -> None:
    for longest in (8, 16, 64, 128, None):
        for load in workloads(longest):
            times = load.streams * (load.tokens - 1)
            assert load.turns * times >= MIN_FOR_P99
            least = LONG_TURNS if load.streams * load.prompt_tokens >= LONG else TURNS
            assert load.turns == least or (load.turns - 1) * times < MIN_FOR_P99  # and no more than that
    assert Workload(32, 1, 1).turns == TURNS
    assert [Workload(512, streams, 64).turns for streams in (1, 4, 8)] == [4, 2, 2]  # 4: enough times between tokens


def test_long_prompts_are_warmed_up_by_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    ORDER.clear()
    OPEN.clear()
    monkeypatch.setattr(generation, "EngineProcess", opened)
    measure_cells([Job("a", 2.0)], [Workload(32, 4, 64), Workload(512, 4, 64)], 50, ConsoleProgress("silent"))  # type: ignore[list-item]
    assert OPEN[0].asked == [(4, 32, 4), *[(4, 32, 64)] * 3, (1, 512, 4), *[(4, 512, 64)] * 2]


def test_percentiles_need_samples() -> None:
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
    assert percentiles([1.0] * 199)["p99"] is None
    assert percentiles([float(value) for value in range(1, 1001)])["p99"] == pytest.approx(990.01)


def test_the_bandwidth_of_this_machine_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.run.bandwidth.ARRAY_BYTES", 2**22)
    assert read_bandwidth(1) > 1e6
