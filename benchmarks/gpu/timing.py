"""Times kernels on a GPU by its own clock: from an event before a launch to one behind it, the cache emptied before each.

    turns      A B A B, so that a clock of the GPU that changes meets all alike; each after a warm-up that does not count
    samples    `BATCH` launches wait in the queue, so that the time of a launch on the host is none of the GPU's

The GPU is a parameter: what is counted and when is tested with a clock that is wound by hand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

ROUNDS, WARM_UP, BATCH = 3, 5, 10
MIN_SAMPLES, MAX_SAMPLES, MAX_MS = 30, 120, 600.0
"""Of each: at least the first, then until one of the others; `MAX_MS` of its own time."""
CACHE_BYTES = 256 * 2**20
"""More than the last cache of any GPU (H100: 50 MiB, B200: 126 MiB)."""


class Gpu(Protocol):
    """What a time is taken on."""

    def clear(self) -> None:
        """Empties the cache."""

    def mark(self) -> Any:
        """Returns an event at this place of the queue."""

    def wait(self) -> None:
        """Waits until the queue is empty."""

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Returns the time between two events that have happened."""


class OnGpu:
    """The current GPU of torch."""

    def __init__(self) -> None:
        self._cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")

    def clear(self) -> None:
        """Writes over the whole cache."""
        self._cache.zero_()

    def mark(self) -> Any:
        """Returns an event of the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize()

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Returns the time between two events."""
        return float(begin.elapsed_time(end))


class OnHost:
    """The clock of the host, for rehearsals without a GPU."""

    def clear(self) -> None:
        """There is no cache to empty."""

    def mark(self) -> float:
        """Returns the time."""
        return time.perf_counter()

    def wait(self) -> None:
        """There is no queue."""

    def milliseconds(self, begin: float, end: float) -> float:
        """Returns the time between two marks."""
        return 1000 * (end - begin)


def in_turns(works: Mapping[str, Callable[[], Any]], gpu: Gpu) -> dict[str, list[float]]:
    """Returns the milliseconds of every sample of each work.

    Args:
        works: Launches kernels, by name.
        gpu: Where.
    """
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(1, ROUNDS + 1):
        for name, work in works.items():
            for _ in range(WARM_UP):
                work()
            gpu.wait()
            _sample(work, gpu, found[name], turn)
    return found


def median_ms(work: Callable[[], Any], gpu: Gpu) -> float:
    """Returns the median time of a work in milliseconds."""
    return statistics.median(in_turns({"": work}, gpu)[""])


def _sample(work: Callable[[], Any], gpu: Gpu, samples: list[float], turn: int) -> None:
    """Adds the samples of a turn."""
    least, most, enough = MIN_SAMPLES * turn // ROUNDS, MAX_SAMPLES * turn // ROUNDS, MAX_MS * turn / ROUNDS
    while len(samples) < least or (len(samples) < most and sum(samples) < enough):
        marks = []
        for _ in range(min(BATCH, most - len(samples))):
            gpu.clear()
            begin = gpu.mark()
            work()
            marks.append((begin, gpu.mark()))
        gpu.wait()
        samples += [gpu.milliseconds(begin, end) for begin, end in marks]
