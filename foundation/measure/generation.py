"""Comparable speeds of engines that answer prompts: time to the first token, time per token, tokens per second, memory bandwidth.

Each engine runs in its own process, and the processes take turns as in `foundation.measure.latency`. In a turn an engine answers as many
prompts of random tokens as there are streams, all asked at once:

    first token       from the start of the turn to the first token of a stream
    time per token    between two tokens of a stream
    tokens per second tokens of all streams / time to the last one
    bandwidth share   (bytes of the weights + bytes of the cache at half of the answer) per median time per token / read bandwidth; of one
                      stream alone, which reads all weights once for each token

Percentiles are over all tokens of all turns, of which there are so many that the times between tokens are at least 200; p99 is None below
200 values. Compare only within one call.

Turns that read `LONG` tokens or more take seconds each, and repeat closely for that reason: there are two of them. Each load is warmed up;
from the second length of prompts on by one stream, since the steps of several were warmed up after short prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foundation.artifacts.timed import Speed
from foundation.core.decoding import Answer, Decoding
from foundation.core.progress import Progress
from foundation.measure.engine_process import EngineProcess
from foundation.stage.context import Job

PROMPT_TOKENS = (32, 512)
STREAMS, LONG_STREAMS = (1, 4, 8), (1, 8)
"""Streams that ask at once; with prompts of the second length the ends alone, as reading those takes seconds."""
TOKENS = 64
"""Tokens of an answer."""
WARM_UP_TOKENS = 4
TURNS, LONG_TURNS = 3, 2
"""Fewest turns, and fewest where a turn is long."""
LONG = 2048
"""Prompt tokens of all streams from which on a turn is long."""
MIN_FOR_P99 = 200


@dataclass(frozen=True)
class Workload:
    """One load: streams that ask at once, each a prompt of so many tokens."""

    prompt_tokens: int
    streams: int
    tokens: int
    """Tokens of each answer."""

    @property
    def turns(self) -> int:
        """Turns, at least `TURNS` or `LONG_TURNS`: enough for the p99 of the times between tokens, if there are any."""
        least = LONG_TURNS if self.streams * self.prompt_tokens >= LONG else TURNS
        between = self.streams * (self.tokens - 1)
        return max(least, math.ceil(MIN_FOR_P99 / between)) if between else least


@dataclass(frozen=True)
class Reads:
    """Bytes that an engine reads from memory for one token."""

    weight_bytes: int
    """All weights that every token is multiplied with."""
    cache_bytes_per_token: int
    """Keys and values of one token in all layers."""


def workloads(longest: int | None) -> list[Workload]:
    """Returns the loads that a model of `longest` positions (None: any number) can answer; long prompts are shortened to fit."""
    room = (2**31 if longest is None else longest) - 1
    tokens = max(1, min(TOKENS, room // 2))
    lengths = sorted({min(length, room - tokens + 1) for length in PROMPT_TOKENS})
    of_length = zip(lengths, (STREAMS, LONG_STREAMS), strict=False)
    return [Workload(length, streams, tokens) for length, counts in of_length for streams in counts]


def measure_generation(
    jobs: Sequence[Job],
    reads: Sequence[Reads],
    loads: Sequence[Workload],
    vocabulary: int,
    bandwidth: float,
    progress: Progress,
) -> list[tuple[int, Speed]]:
    """Measures every engine under every load; all processes stay alive throughout.

    Args:
        jobs: The engines.
        reads: What each of them reads for a token.
        loads: The loads.
        vocabulary: Number of token ids.
        bandwidth: Bytes per second that this machine reads.
        progress: Shows a bar.

    Returns:
        For each engine and load the index of the job and its row; engines in the order of `jobs`.

    Raises:
        EngineError: An engine failed.
    """
    cells = measure_cells(jobs, loads, vocabulary, progress)
    return [
        (index, cells[load][index].row(job, load, read, bandwidth))
        for index, (job, read) in enumerate(zip(jobs, reads, strict=True))
        for load in loads
    ]


def measure_cells(
    jobs: Sequence[Job], loads: Sequence[Workload], vocabulary: int, progress: Progress, turns_of: Callable[[Workload], int] | None = None
) -> dict[Workload, list[Cell]]:
    """Returns the samples of every engine under every load, in the order of `jobs`; the arguments are as for `measure_generation`.

    Args:
        turns_of: Turns of a load; default: `Workload.turns`.
    """
    random = np.random.default_rng(0)
    turns = {load: load.turns if turns_of is None else turns_of(load) for load in loads}
    shortest = min(load.prompt_tokens for load in loads)
    with ExitStack() as stack:
        processes = [stack.enter_context(EngineProcess(job)) for job in jobs]
        advance = stack.enter_context(progress.bar("generation", len(jobs) * sum(turns.values())))
        cells = {load: [Cell() for _ in jobs] for load in loads}
        for load, row in cells.items():
            prompts = [random.integers(0, vocabulary, load.prompt_tokens).astype(np.int32) for _ in range(load.streams)]
            for turn in range(turns[load]):
                for process, cell in zip(processes, row, strict=True):
                    if turn == 0:
                        _answer(process, prompts if load.prompt_tokens == shortest else prompts[:1], WARM_UP_TOKENS)
                    cell.take(*_answer(process, prompts, load.tokens))
                    advance(1)
    return cells


@dataclass
class Cell:
    """The samples of one engine under one load."""

    first_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)
    """Tokens per second of each turn."""
    peak_memory_bytes: int = 0

    def __add__(self, other: Cell) -> Cell:
        """Returns the samples of both."""
        return Cell(
            self.first_ms + other.first_ms,
            self.between_ms + other.between_ms,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.rates + other.rates,
            max(self.peak_memory_bytes, other.peak_memory_bytes),
        )

    def take(self, answers: Sequence[Answer], peak_memory_bytes: int) -> None:
        """Adds one turn."""
        tokens, seconds = sum(len(answer.seconds) for answer in answers), max(answer.seconds[-1] for answer in answers)
        for answer in answers:
            self.first_ms.append(1e3 * answer.seconds[0])
            self.between_ms += (1e3 * np.diff(answer.seconds)).tolist()
        self.tokens += tokens
        self.seconds += seconds
        self.rates.append(tokens / seconds)
        self.peak_memory_bytes = peak_memory_bytes

    def row(self, job: Job, load: Workload, reads: Reads, bandwidth: float) -> Speed:
        """Returns the row of the report."""
        token_ms = percentiles(self.between_ms)
        return Speed(
            threads=job.threads,
            prompt_tokens=load.prompt_tokens,
            streams=load.streams,
            tokens=load.tokens,
            first_token_ms=percentiles(self.first_ms),
            token_ms=token_ms,
            tokens_per_s=round(self.tokens / self.seconds, 2),
            n=len(self.between_ms),
            bandwidth_share=bandwidth_share(reads, load, token_ms["p50"], bandwidth) if load.streams == 1 else None,
            weight_bytes=reads.weight_bytes,
            cache_bytes_per_token=reads.cache_bytes_per_token,
            peak_memory_bytes=self.peak_memory_bytes,
        )


def percentiles(samples_ms: Sequence[float]) -> dict[str, float | None]:
    """Returns `p50`, `p90` and `p99` in ms; None without samples, and for p99 below 200 of them."""
    if not samples_ms:
        return {"p50": None, "p90": None, "p99": None}
    p50, p90, p99 = (round(float(value), 4) for value in np.percentile(samples_ms, (50, 90, 99)))
    return {"p50": p50, "p90": p90, "p99": p99 if len(samples_ms) >= MIN_FOR_P99 else None}


def bandwidth_share(reads: Reads, load: Workload, token_ms: float | None, bandwidth: float) -> float | None:
    """Returns the share of the read bandwidth that a single stream uses between two tokens; None where it was too fast to time."""
    if not token_ms:
        return None
    cached = load.prompt_tokens + load.tokens / 2
    return round((reads.weight_bytes + cached * reads.cache_bytes_per_token) / (token_ms / 1e3) / bandwidth, 4)


def _answer(process: EngineProcess, prompts: Sequence[NDArray[np.int32]], tokens: int) -> tuple[list[Answer], int]:
    answers = process.generate(prompts, Decoding(max_tokens=tokens, ignore_end=True))
    return answers, process.peak_memory_bytes
