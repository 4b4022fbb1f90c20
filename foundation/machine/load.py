"""Measures other load on this machine while engines are timed.

    other cores    (time of all cores spent at work - processor time of this process and its children) / wall time
    stolen         share of the time of all cores that a hypervisor gave to other guests
    throttled      seconds that a limit of the container stopped its processes
    pressure       share of the time in which a process waited for a core (/proc/pressure/cpu)
    calibration    processor time of one fixed kernel, timed between engines: it grows where the clock falls, or others take memory
                   bandwidth or caches. The spread is p90 / p10 - 1

Linux reports all of this in files; what a kernel does not report is None.
"""

from __future__ import annotations

import os
import re
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

DISTURBING = 0.05
"""Share of stolen or throttled time from which on a block of samples is measured again."""
SLOW = 1.3
"""A block is taken again where the kernel took so many times its least time, before and after it."""
KERNEL = np.random.default_rng(0).integers(0, 2**31, 20_000)
"""Sorted by the calibration kernel, in about a millisecond."""
THROTTLED = (("/sys/fs/cgroup/cpu.stat", "throttled_usec", 1e6), ("/sys/fs/cgroup/cpu/cpu.stat", "throttled_time", 1e9))


@dataclass(frozen=True)
class Snapshot:
    """Counters of the machine, in seconds."""

    wall: float
    busy: float | None
    stolen: float | None
    throttled: float | None
    pressure: float | None
    own: float
    """Processor time of this process and of the children that have ended."""


def snapshot() -> Snapshot:
    """Reads the counters."""
    busy, stolen = _cores(_text("/proc/stat"))
    own = sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    pressure = re.search(r"^some .*total=(\d+)", _text("/proc/pressure/cpu"), re.M)
    return Snapshot(time.monotonic(), busy, stolen, _throttled(), int(pressure[1]) / 1e6 if pressure else None, own)


def calibrate() -> float:
    """Returns the processor time of the kernel in ms, the least of three."""
    times = []
    for _ in range(3):
        started = time.thread_time()
        np.sort(KERNEL, kind="stable")
        times.append(1e3 * (time.thread_time() - started))
    return min(times)


class MachineLoad(TypedDict):
    """How busy the machine was during a measurement (`compress.report.model.contents.Machine`)."""

    seconds: float
    cores: int
    load_average: list[float]
    other_cores: float | None
    stolen: float | None
    throttled_s: float | None
    pressure: float | None
    clock_mhz: list[int] | None
    calibration_ms: float
    calibration_spread: float | None
    repeated: int
    came_first: bool


class Watch:
    """Watches the machine during a measurement."""

    def __init__(self) -> None:
        self.repeated = 0
        """Blocks that were taken again."""
        self.came_first = False
        """Whether the measured processes came before other work (`foundation.machine.priority`)."""
        self._start = self._before = snapshot()
        self._calibrations = [calibrate()]

    def disturbed(self) -> bool:
        """Whether time was stolen or throttled, or the machine was slow, since the last call."""
        now, before = snapshot(), self._before
        self._before = now
        self._calibrations.append(calibrate())
        wall, cores = max(1e-9, now.wall - before.wall), os.cpu_count() or 1
        taken = (_since(now.stolen, before.stolen) or 0) / cores + (_since(now.throttled, before.throttled) or 0)
        return taken > DISTURBING * wall or min(self._calibrations[-2:]) > SLOW * min(self._calibrations)

    def summary(self) -> MachineLoad:
        """Returns how busy the machine was since the start; asked when the engines have ended."""
        now, start = snapshot(), self._start
        wall, cores = max(1e-9, now.wall - start.wall), os.cpu_count() or 1
        busy, stolen = _since(now.busy, start.busy), _since(now.stolen, start.stolen)
        low, middle, high = np.percentile(self._calibrations, (10, 50, 90))
        throttled, pressure = _since(now.throttled, start.throttled), _since(now.pressure, start.pressure)
        return {
            "seconds": round(wall, 1),
            "cores": cores,
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "other_cores": None if busy is None else round(max(0.0, busy - (now.own - start.own)) / wall, 2),
            "stolen": None if stolen is None else round(stolen / wall / cores, 4),
            "throttled_s": None if throttled is None else round(throttled, 2),
            "pressure": None if pressure is None else round(pressure / wall, 4),
            "clock_mhz": _clock(_text("/proc/cpuinfo")),
            "calibration_ms": round(float(middle), 4),
            "calibration_spread": round(float(high / low - 1), 4) if low > 0 else None,
            "repeated": self.repeated,
            "came_first": self.came_first,
        }


def _since(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


def _cores(stat: str) -> tuple[float | None, float | None]:
    """Returns the seconds that all cores were at work, and that were stolen from them, from /proc/stat."""
    line = re.search(r"^cpu +(.+)$", stat, re.M)
    if line is None:
        return None, None
    user, nice, system, _, _, interrupts, soft, stolen = (int(number) for number in line[1].split()[:8])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + interrupts + soft) / ticks, stolen / ticks


def _throttled() -> float | None:
    """Returns the seconds that the container was stopped; None without a limit."""
    for file, name, unit in THROTTLED:
        found = re.search(rf"^{name} (\d+)", _text(file), re.M)
        if found:
            return int(found[1]) / unit
    return None


def _clock(cpuinfo: str) -> list[int] | None:
    """Returns the lowest and the highest clock of the cores, MHz."""
    clocks = [float(one) for one in re.findall(r"^cpu MHz\s*: ([\d.]+)", cpuinfo, re.M)]
    return [round(min(clocks)), round(max(clocks))] if clocks else None


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError:  # no such file on this system, or not for this user
        return ""
