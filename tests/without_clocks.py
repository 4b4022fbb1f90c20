"""Latency that nobody measured: the rows of every engine and shape, for whole runs whose tests ask for no figure of time.

Each engine that is timed is a process, and one of torch takes five seconds to start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.artifacts.timed import Timing
from foundation.core.progress import Progress
from foundation.measure import generation, latency, race
from foundation.measure.latency import MIN_SAMPLES, TURNS, Cell, Shape
from foundation.measure.samples import Turn
from foundation.models.own_shape import SHAPE_KEY
from foundation.stage.context import Job


def measure(jobs: Sequence[Job], shapes: Sequence[Shape], progress: Progress, *watched: Any) -> list[tuple[int, Timing]]:
    """Stands for `foundation.measure.latency.measure`: the engines take 1, 2, 3 ... ms."""
    return _timed(jobs, shapes, [1.0 + index for index in range(len(jobs))])


def falling(jobs: Sequence[Job], shapes: Sequence[Shape], progress: Progress, *watched: Any) -> list[tuple[int, Timing]]:
    """The same with times that fall: what is built last, the quantized model, is the fastest."""
    return _timed(jobs, shapes, [1.0 + index for index in reversed(range(len(jobs)))])


def _timed(jobs: Sequence[Job], shapes: Sequence[Shape], times_ms: Sequence[float]) -> list[tuple[int, Timing]]:
    rows = []
    for index, (job, time_ms) in enumerate(zip(jobs, times_ms, strict=True)):
        cell = Cell()
        cell.turns, cell.peak_memory_bytes = [Turn(np.full(MIN_SAMPLES // TURNS, time_ms)) for _ in range(TURNS)], 2**20
        cell.placement = {name: job.labels[name] for name in ("device", "float_precision")} | {"provider": "nobody"}
        rows += [(index, cell.row(job, shape)) for shape in shapes]
    return rows


def by_size(timer: Any, checkpoints: Sequence[Path], shape: Shape, precision: Any) -> list[float]:
    """Stands for `compress.run.timer.Timer.__call__`: a model takes 0.01 ms, a head of a block 0.025 ms, and a neuron 0.015 ms."""
    configs = [json.loads((folder / "config.json").read_text()) for folder in checkpoints]
    return [0.01 + sum(0.025 * heads + 0.015 * ffn for heads, ffn in blocks_of(config)) for config in configs]


def blocks_of(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns the heads and neurons of each block, as a config says."""
    own, depth = config.get(SHAPE_KEY, {}), config["num_hidden_layers"]
    heads, ffn = ([config[name]] * depth for name in ("num_attention_heads", "intermediate_size"))
    return list(zip(own.get("heads", heads), own.get("ffn", ffn), strict=True))


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Times as little as can be: of answers one turn of one stream. The rows of the report are there, and their figures mean nothing."""
    patch.setattr(latency, "MAX_SAMPLES", 3)
    patch.setattr(latency, "BLOCKS", (race.Block(3, 3, 0.0),) * latency.TURNS)
    patch.setattr(latency, "MAX_TURNS", latency.TURNS)
    patch.setattr(latency, "SHORT_TURNS", latency.TURNS)
    patch.setattr(generation, "TURNS", 1)
    patch.setattr(generation, "MIN_FOR_P99", 1)
    patch.setattr(generation, "STREAMS", (1,))
