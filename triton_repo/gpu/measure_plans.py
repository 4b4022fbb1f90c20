"""Measures what a GPU model repository serves, on the machine that serves: plans, and the processes before and behind them.

    latency     of the plan and of its float rival in 16 bits, in turns A B A B, rows on the GPU already: the whole batch, host time; as
                CUDA graphs where Triton runs them so, and then of the plan kernel by kernel too
    rates       rows per second of one process that tokenizes (or decodes images), and of one that turns logits into labels
    processes   ceil(rows per second of all GPUs / rows per second of one process), at most one for each core

`build_plans.py` writes all of it to `plans.json`. It needs only numpy and is copied next to `build_plans.py`.

Left out: copies between host and GPU, the network, and how batches form; `make gpu-check` and `compress bench --server`
measure a whole server.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypedDict, TypeVar

import numpy as np

ROUNDS = 3
"""Turns of each plan; a machine that changes its clock between them disturbs both alike."""
MIN_SAMPLES, MAX_SAMPLES, MAX_SECONDS = 30, 200, 3.0
"""Samples of a plan and shape: at least the first, then until one of the others."""
WARM_UP = 10
MIN_FOR_P99 = 200
RATE_SECONDS = 1.0
MASK = "attention_mask"
T = TypeVar("T")


class Shapes(TypedDict):
    """What a repository is timed at: a part of `gpu.json`."""

    inputs: list[str]
    dims: dict[str, tuple[str, list[int]]]
    buckets: list[int]
    batch_sizes: list[int]


class Quantiles(TypedDict):
    """Quantiles of the samples of a plan."""

    p50_ms: float
    p90_ms: float
    p99_ms: float | None
    """None below `MIN_FOR_P99` samples."""
    n: int


class Timed(TypedDict):
    """The latency of plans at one shape."""

    batch: int
    sequence: int | None
    """None for images."""
    plan: Quantiles
    rival: Quantiles | None
    launched: Quantiles | None
    """The plan kernel by kernel; None where it runs so anyway."""
    speedup: float | None
    """p50 of the rival / p50 of the plan; None without a rival."""


class Ready(Protocol):
    """A plan on a GPU."""

    def ready(self, features: Mapping[str, np.ndarray], *, graph: bool = False) -> Callable[[], None]:
        """Returns a function that runs a batch once and waits for it."""


def features_of(
    golden: Mapping[str, np.ndarray], inputs: Sequence[str], bucket: int, batch: int, dims: Mapping[str, tuple[str, Sequence[int]]]
) -> dict[str, np.ndarray]:
    """Returns arrays [batch, ...] of one shape: the golden rows of the bucket over and over; zeros, nothing masked, where it has none.

    Args:
        golden: Arrays `<bucket>.<input>`.
        inputs: Names of the inputs.
        bucket: Sequence length in tokens; 0 for images.
        batch: Number of rows.
        dims: Type and shape of a row without golden rows, by input; -1 is the sequence.
    """
    found = {}
    for name in inputs:
        rows = golden[f"{bucket}.{name}"]
        if len(rows) == 0:
            kind, shape = dims[name]
            rows = np.full((1, *(bucket if size == -1 else size for size in shape)), int(name == MASK), np.dtype(kind))
        found[name] = np.resize(rows, (batch, *rows.shape[1:]))
    return found


def in_turns(runs: Mapping[str, Callable[[], None]], clock: Callable[[], float] = time.perf_counter) -> dict[str, list[float]]:
    """Returns the seconds of every sample of each, taken in `ROUNDS` turns, each after a warm-up that does not count.

    Args:
        runs: What runs once and waits, by name.
        clock: Seconds.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1, ROUNDS + 1):
        for name, once in runs.items():
            for _ in range(WARM_UP):
                once()
            least, most, began = MIN_SAMPLES * turn // ROUNDS, MAX_SAMPLES * turn // ROUNDS, clock()
            while len(samples[name]) < most:
                before = clock()
                once()
                after = clock()
                samples[name].append(after - before)
                if len(samples[name]) >= least and after - began > MAX_SECONDS / ROUNDS:
                    break
    return samples


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """Returns the quantiles of samples."""
    p50, p90, p99 = (round(1000 * float(value), 5) for value in np.percentile(seconds, (50, 90, 99)))
    return {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99 if len(seconds) >= MIN_FOR_P99 else None, "n": len(seconds)}


def latencies(
    plans: Mapping[str, Ready],
    golden: Mapping[str, np.ndarray],
    spec: Shapes,
    graphs: Collection[str] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """Times plans on every shape of the repository, largest first, so that no buffer grows between the turns of one shape.

    Args:
        plans: `plan` and, where there is one, `rival`, on the same GPU.
        golden: The golden arrays.
        spec: The shapes.
        graphs: Names of the plans that run as CUDA graphs.
        clock: Seconds.

    Returns:
        The latency at each shape.
    """
    rows: list[Timed] = []
    for bucket in sorted(spec["buckets"] or [0], reverse=True):
        for batch in sorted(spec["batch_sizes"], reverse=True):
            features = features_of(golden, spec["inputs"], bucket, batch, spec["dims"])
            found = {name: quantiles(seconds) for name, seconds in in_turns(_ready(plans, features, graphs), clock).items()}
            plan, rival = found["plan"], found.get("rival")
            speedup = None if rival is None else round(rival["p50_ms"] / plan["p50_ms"], 4)
            rows.append(
                {
                    "batch": batch,
                    "sequence": bucket or None,
                    "rival": rival,
                    "launched": found.get("launched"),
                    "plan": plan,
                    "speedup": speedup,
                }
            )
    return rows[::-1]


def _ready(plans: Mapping[str, Ready], features: Mapping[str, np.ndarray], graphs: Collection[str]) -> dict[str, Callable[[], None]]:
    """Puts the rows of all plans on the GPU before the first turn: their buffers have grown then."""
    launched = [plan.ready(features) for plan in plans.values()]
    found = {name: plan.ready(features, graph=name in graphs) for name, plan in plans.items()}
    return {**found, **({"launched": launched[list(plans).index("plan")]} if "plan" in graphs else {})}


def plan_rate(rows: Sequence[Timed], golden: Mapping[str, np.ndarray]) -> float:
    """Returns the rows per second of a plan on one GPU, at the largest batch, with buckets as frequent as in the golden rows.

    Args:
        rows: Result of `latencies`.
        golden: The golden arrays.
    """
    largest = max(row["batch"] for row in rows)
    seconds = {row["sequence"] or 0: row["plan"]["p50_ms"] / 1000 / largest for row in rows if row["batch"] == largest}
    counts = {bucket: len(golden[f"{bucket}.logits"]) for bucket in seconds}
    return float(sum(counts.values()) / sum(counts[bucket] * seconds[bucket] for bucket in seconds))


def rate(work: Callable[[T], object], rows: Sequence[T], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns how many rows per second `work` does, one at a time, over and over for `RATE_SECONDS`, the first pass apart."""
    for row in rows:
        work(row)
    began = clock()
    for done, row in enumerate(itertools.cycle(rows), 1):
        work(row)
        passed = clock() - began
        if passed >= RATE_SECONDS:
            return done / passed
    raise AssertionError("unreachable")


def processes(wanted: float, one: float, cores: int) -> int:
    """Returns how many processes do `wanted` rows per second where one does `one`: at least 1, at most `cores`."""
    return max(1, min(cores, math.ceil(wanted / one)))
