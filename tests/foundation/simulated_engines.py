"""Engines that run on a simulated machine: what other work takes from their threads is drawn, and no real clock is read.

A thread that wants to run waits for a core with the share 1 - cores / (threads + load) of its time, in pieces of about 3 ms, as long as the
kernel lets others run. All threads of a call wait for each other, so that each wait makes the call longer: by all of it where work is dealt
out beforehand, by less where threads take over from each other. Threads that spin burn processor time meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foundation.measure.samples import enough, is_undisturbed

SLICE_MS = 3.0
WARM_UP_MS = 100.0


@dataclass
class Machine:
    """Cores that others use too."""

    load: float = 0.0
    """Cores that other work wants."""
    cores: int = 2
    seed: int = 0
    spent_ms: float = 0.0
    asked: list[tuple[str, int, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)


@dataclass(frozen=True)
class Simulated:
    """A job with known times."""

    name: str
    quiet_ms: Mapping[tuple[int, int | None], float]
    machine: Machine
    threads: int = 2
    dealt: float = 1.0
    """Share of a wait by which a call takes longer."""
    spins: float = 0.0
    """Processor time burnt per wait."""
    noise: float = 0.02
    """Standard deviation of single calls; between turns it is half as much."""
    precision: str = "fp32"
    mode: str = "static"

    @property
    def labels(self) -> dict[str, str]:
        return {"engine": self.name, "mode": self.mode, "precision": self.precision, "float_precision": "fp32", "device": "cpu"}


class Process:
    """Stands for `EngineProcess`."""

    def __init__(self, job: Simulated, *, wait: bool) -> None:
        self.job, self.is_open = job, wait

    def await_open(self) -> None:
        self.is_open = True

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, op: str, *, batch: int, sequence: int | None, least: int, most: int, seconds: float) -> dict[str, Any]:
        assert self.is_open
        job, machine = self.job, self.job.machine
        machine.asked.append((job.name, batch, sequence))
        quiet = job.quiet_ms[batch, sequence] * float(np.exp(machine.random.normal(0, job.noise / 2)))
        machine.spent_ms += WARM_UP_MS
        samples: list[tuple[float, float, float]] = []
        count, clean_s = 0, 0.0
        while not (
            enough(count, clean_s, least, most, seconds) or enough(len(samples), _seconds(samples), 2 * least, 2 * most, 2 * seconds)
        ):
            samples.append(self._call(quiet))
            if is_undisturbed(samples[-1][0], samples[-1][2]):
                count, clean_s = count + 1, clean_s + samples[-1][0] / 1e3
        wall, cpu, waited = (list(column) for column in zip(*samples, strict=True))
        machine.spent_ms += sum(wall)
        placement = {"device": "cpu", "provider": "simulated", "float_precision": "fp32"}
        return {"samples_ms": wall, "cpu_ms": cpu, "waited_ms": waited, "came_first": False, "peak_memory_bytes": 1, "placement": placement}

    def _call(self, quiet: float) -> tuple[float, float, float]:
        """Returns wall, processor and waited time in ms of one call."""
        job, random = self.job, self.job.machine.random
        quiet *= float(np.exp(random.normal(0, job.noise)))
        share = max(0.0, 1 - job.machine.cores / (job.threads + job.machine.load))
        waits = random.poisson(share / (1 - share) * quiet / SLICE_MS, job.threads)
        waited = float(sum(random.exponential(SLICE_MS, number).sum() for number in waits))
        return quiet + job.dealt * waited, job.threads * 0.97 * quiet + job.spins * waited, waited


def _seconds(samples: list[tuple[float, float, float]]) -> float:
    return sum(sample[0] for sample in samples) / 1e3
