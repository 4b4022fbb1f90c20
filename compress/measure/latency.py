"""Comparable latencies of several engines on one machine.

Each engine runs in its own process. For each shape the processes take turns, A B C A B C A B C, one at a time, so that a slow phase of the
machine affects all of them. A turn starts with discarded warm-up calls. Each engine and shape gets at least 30 samples, then more up to 200
samples or 3 s. Compare latencies only within one call of `measure`.

    throughput = batch * n / sum(samples)          percentiles: linear interpolation; p99 is None below 200 samples

Not measured: concurrent streams. The load test of the Triton stage measures latency under load.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import ceil
from typing import Any

import numpy as np

from compress.core.progress import Progress
from compress.measure.engine_process import EngineProcess, Job

TURNS = 3
MIN_SAMPLES, MAX_SAMPLES = 30, 200
MAX_SECONDS = 3.0
Shape = tuple[int, int | None]


def measure(jobs: Sequence[Job], shapes: Sequence[Shape], progress: Progress) -> list[dict[str, Any]]:
    """Measures every engine at every shape; all processes stay alive throughout.

    Args:
        jobs: The engines.
        shapes: (batch, sequence) each; the sequence is None for images.
        progress: Shows a bar.

    Returns:
        One row for each engine and shape, engines in the order of `jobs`: `job` (index), `engine`, `mode`, `precision`; `device`,
        `provider` and `float_precision` as the engine reports them; `threads`, `batch`, `sequence`, `p50_ms`, `p90_ms`, `p99_ms`,
        `throughput_per_s`, `n`, `quantiles_ms` (0, 5, ... 100 %), `peak_memory_bytes`.

    Raises:
        EngineError: An engine failed.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(EngineProcess(job)) for job in jobs]
        advance = stack.enter_context(progress.bar("latency", len(shapes) * len(jobs) * TURNS))
        cells = {shape: [Cell() for _ in jobs] for shape in shapes}
        for shape, row in cells.items():
            for turn in range(TURNS):
                for process, cell in zip(processes, row, strict=True):
                    cell.take(process, shape, TURNS - turn)
                    advance(1)
    return [cells[shape][index].row(index, job, shape) for index, job in enumerate(jobs) for shape in shapes]


class Cell:
    """The samples of one engine at one shape."""

    def __init__(self) -> None:
        self.samples_ms: list[float] = []
        self.peak_memory_bytes = 0
        self.placement: dict[str, str] = {}

    def take(self, process: EngineProcess, shape: Shape, turns_left: int) -> None:
        """Takes this turn's share of the missing samples."""
        count = ceil((MAX_SAMPLES - len(self.samples_ms)) / turns_left)
        least = ceil((MIN_SAMPLES - len(self.samples_ms)) / turns_left)
        seconds = max(0.0, MAX_SECONDS - sum(self.samples_ms) / 1e3) / turns_left
        answer = process.ask("measure", batch=shape[0], sequence=shape[1], least=max(1, least), most=max(1, count), seconds=seconds)
        self.samples_ms += answer["samples_ms"]
        self.peak_memory_bytes, self.placement = answer["peak_memory_bytes"], answer["placement"]

    def row(self, index: int, job: Job, shape: Shape) -> dict[str, Any]:
        """Returns the row of the report."""
        p50, p90, p99 = (round(float(value), 4) for value in np.percentile(self.samples_ms, (50, 90, 99)))
        return {
            "job": index,
            **{name: job.labels[name] for name in ("engine", "mode", "precision")},
            **self.placement,
            "threads": job.threads,
            "batch": shape[0],
            "sequence": shape[1],
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99 if len(self.samples_ms) >= MAX_SAMPLES else None,
            "throughput_per_s": round(1e3 * shape[0] * len(self.samples_ms) / sum(self.samples_ms), 2),
            "n": len(self.samples_ms),
            "quantiles_ms": [round(float(value), 4) for value in np.percentile(self.samples_ms, range(0, 101, 5))],
            "peak_memory_bytes": self.peak_memory_bytes,
        }
