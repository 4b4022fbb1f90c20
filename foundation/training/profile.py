"""A profile of a training, on demand: the speed of its steps, what they wait for, and their memory.

    steps 1-3      not looked at: kernels are chosen, caches filled
    next 10        timed as they are: tokens a second, and the utilisation
    next 3         under torch's profiler: the trace, shares of operations and of communication, memory

A shorter training is divided in the same proportion.

    utilisation    6 MACs a second / (processes * speed): a forward pass takes 2 FLOPs a MAC, its backward pass twice as many (PaLM,
                   https://arxiv.org/abs/2204.02311, appendix B). MACs are counted for the trained model at the padded length of each batch;
                   of a teacher, of a second forward pass or of activations that are computed again none are counted. The speed is that
                   of a large matrix product in the type of the training, measured on the same device.
    communication  the time in which a collective runs, or is waited for, over the time of the profiled steps; overlaps count once
    memory         what torch holds on the device, read from the allocations in the trace; on the CPU what came since the trace began

Only the first process is profiled. Files, in the folder `profiles` of the run:

    LABEL.trace.json.gz    open it in https://ui.perfetto.dev or chrome://tracing
    LABEL.json             the figures, which the report shows

Nothing of this happens, and this file is not imported, where no profile is asked for.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foundation.artifacts.artifact import write_json
from foundation.machine.gemm_speed import gemm_speed
from foundation.models.library import task_of
from foundation.models.size import count

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WARM, TIMED, TRACED = 3, 10, 3
"""Steps of each part."""
FLOPS_PER_MAC = 6
MOST_POINTS = 200
"""Points of the memory timeline that are kept."""
MOST_OPERATIONS = 12
COMMUNICATION = re.compile(r"^(gloo:|nccl:|c10d::|ncclDevKernel|ncclKernel)")
MEMORY = "[memory]"
Interval = tuple[float, float]
Event = Mapping[str, Any]
"""An event of a trace: `ph`, `name`, `ts` and `dur` (microseconds), `args`."""


@dataclass
class Profiler:
    """Profiles the steps of one training."""

    folder: Path
    """Folder of the files; created when they are written."""
    label: str
    """Name of the training, and of its files."""
    device: torch.device
    """Device of the computation."""
    dtype: torch.dtype
    """Type of its matrix products."""
    processes: int
    """Number of processes that share each batch."""
    macs: Callable[[int], int]
    """Returns the multiply-accumulates of the model for a row of some length."""
    num_steps: int
    """Steps that are left."""
    done: int = 0
    """Steps so far."""
    seconds: float = 0.0
    """Time of the timed steps."""
    tokens: int = 0
    """Tokens of their rows, without padding."""
    padded: int = 0
    """The same with padding."""
    rows: int = 0
    """Their rows."""
    work: float = 0.0
    """Multiply-accumulates of one forward pass over them."""
    traced_seconds: float = 0.0
    """Time of the profiled steps."""
    tracer: Any = field(default=None, repr=False)
    """Torch's profiler while it runs."""

    @property
    def parts(self) -> tuple[int, int, int]:
        """Steps that are not looked at, timed and profiled."""
        whole = WARM + TIMED + TRACED
        if self.num_steps >= whole:
            return WARM, TIMED, TRACED
        warm, traced = self.num_steps * WARM // whole, max(1, self.num_steps * TRACED // whole)
        return warm, max(0, self.num_steps - warm - traced), traced

    @contextmanager
    def step(self, lengths: Sequence[int]) -> Iterator[None]:
        """Within the block, one step is taken.

        Args:
            lengths: Tokens of each row of the whole batch; 0 for rows of one size.
        """
        warm, timed, traced = self.parts
        number, self.done = self.done, self.done + 1
        if warm + timed == number:
            self._start()
        started = self._now()
        try:
            yield
        except BaseException:
            if self.tracer is not None:
                self.tracer.stop()
            raise
        if warm <= number < warm + timed:
            self.seconds += self._now() - started
            longest = max(lengths)
            self.rows, self.tokens = self.rows + len(lengths), self.tokens + sum(lengths)
            self.padded += longest * len(lengths)
            self.work += self.macs(longest) * len(lengths)
        elif warm + timed <= number < warm + timed + traced:
            self.traced_seconds += self._now() - started
            if number == warm + timed + traced - 1:
                self._finish()

    def _now(self) -> float:
        """Returns the time in seconds at which the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        self.tracer = profile(activities=activities, profile_memory=True)
        self.tracer.start()

    def _finish(self) -> None:
        """Writes the trace and the figures."""
        self.tracer.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.label)
        trace = self.folder / f"{name}.trace.json.gz"
        self.tracer.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        write_json(self.folder / f"{name}.json", self.figures(events, self.tracer.key_averages()) | {"trace": trace.name})
        self.tracer = None

    def figures(self, events: Sequence[Event], averages: Iterable[Any]) -> dict[str, object]:
        """Returns the contents of LABEL.json.

        Args:
            events: Events of the trace; times in microseconds.
            averages: Times of each operation, of torch's profiler.
        """
        _, timed, traced = self.parts
        speed = gemm_speed(self.device, self.dtype)
        per_second = FLOPS_PER_MAC * self.work / self.seconds if self.seconds else None
        timeline = memory_timeline(events, 1 if self.device.type == "cuda" else 0)
        return {
            "label": self.label,
            "device": self.device.type,
            "precision": str(self.dtype).removeprefix("torch."),
            "processes": self.processes,
            "timed_steps": timed,
            "traced_steps": traced,
            "step_ms": 1e3 * self.seconds / timed if timed else None,
            "rows_per_s": self.rows / self.seconds if self.seconds else None,
            "tokens_per_s": self.tokens / self.seconds if self.seconds and self.tokens else None,
            "padding_share": 1 - self.tokens / self.padded if self.padded else None,
            "flops_per_s": per_second,
            "gemm_flops_per_s": speed,
            "utilisation": per_second / (self.processes * speed) if per_second is not None else None,
            "communication_share": busy(communication(events)) / (1e6 * self.traced_seconds) if self.traced_seconds else None,
            "peak_bytes": max((size for _, size in timeline), default=None),
            "memory": thinned(timeline),
            "operations": operations(averages, self.device.type == "cuda"),
        }


def macs_of(model: nn.Module) -> Callable[[int], int]:
    """Returns a function from the length of a row to the multiply-accumulates of a forward pass of a model over it."""
    config: PreTrainedConfig = model.config
    task = task_of(config)
    return functools.cache(lambda length: count(config, task, length).macs)


def communication(events: Iterable[Event]) -> list[Interval]:
    """Returns the intervals, in microseconds, in which a collective runs or is waited for."""
    found = [event for event in events if event.get("ph") == "X" and COMMUNICATION.match(str(event.get("name", "")))]
    return [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in found]


def busy(intervals: Iterable[Interval]) -> float:
    """Returns the length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def memory_timeline(events: Iterable[Event], device_type: int) -> list[tuple[float, int]]:
    """Returns (milliseconds since the first event, bytes that torch holds) by time.

    Args:
        events: Events of the trace.
        device_type: 0 for the CPU, 1 for CUDA.
    """
    found = [event for event in events if event.get("name") == MEMORY and event["args"].get("Device Type") == device_type]
    points = sorted((float(event["ts"]), int(event["args"]["Total Allocated"])) for event in found)
    return [((at - points[0][0]) / 1e3, size) for at, size in points]


def thinned(timeline: Sequence[tuple[float, int]]) -> list[list[float]]:
    """Returns at most `MOST_POINTS` points: of each stretch of equally many the highest, so that peaks stay."""
    stretch = -(-len(timeline) // MOST_POINTS) or 1
    parts = (timeline[start : start + stretch] for start in range(0, len(timeline), stretch))
    return [[round(at, 3), size] for at, size in (max(part, key=lambda point: point[1]) for part in parts)]


def operations(averages: Iterable[Any], on_gpu: bool) -> list[dict[str, object]]:
    """Returns the operations with the most time of their own: `name`, `share` of the time of all operations, `calls`."""
    times = {one.key: (one.self_device_time_total if on_gpu else one.self_cpu_time_total, one.count) for one in averages}
    whole = sum(spent for spent, _ in times.values()) or 1.0
    first = sorted(times.items(), key=lambda item: -item[1][0])[:MOST_OPERATIONS]
    return [{"name": name, "share": spent / whole, "calls": calls} for name, (spent, calls) in first if spent]
