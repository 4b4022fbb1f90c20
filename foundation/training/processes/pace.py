"""Which process of a training is slow: how long each one works on a step, apart from what it waits for the others.

    own      = run + queued + stalled, in seconds
    run      the main thread had a core                                              /proc/self/task/TID/schedstat, first number
    queued   it was ready, and other work had the core                               second number
    stalled  the process could not run at all: it was stopped, or throttled. A thread that sleeps for `TICK_S` finds out: it wakes too late,
             by more than it was queued itself

A process that waits within a collective sleeps: none of the three grows. Each process sends its sums (`foundation.machine.lifeline`), so
that no collective is added. Process 0 compares windows of at least `lifeline.PULSE_S` seconds and `FEWEST_STEPS` steps:

    slow     own of a process is at least `RATIO` times the median of the others, for a step and for a row, and the difference is at least
             `SHARE` of a step, in `WINDOWS` windows one after another

For a step and for a row, because a batch that cannot be dealt out evenly gives some processes more rows. Stages of a pipeline work for
different times by design, so only processes with the same stage are compared.

Left out: on GPUs the main thread spins while it waits, so that own is the whole step in all processes: nobody is named there, but a
process that is stopped is (`SILENT_S`). What waits for a disk counts as waiting. A slow link slows down all processes alike.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from foundation.machine.lifeline import Gauge, Peer, Pulse, named
from foundation.machine.parallel import Team
from foundation.machine.waits import TASKS

TICK_S = 0.05
"""Seconds between two looks of the thread; stops that are much shorter are not seen."""
LATE_S = 0.01
"""A thread of Python may wake as much too late without a reason."""
RATIO, SHARE, WINDOWS, FEWEST_STEPS = 1.5, 0.2, 2, 2
RECOVERED = 1.2
"""Ratio below which a process that was named is as fast as the others again."""
SILENT_S = 30.0
"""A process that trains and has sent nothing for as long is named."""


@dataclass(frozen=True)
class Worked:
    """What a process has done in a training so far."""

    steps: float = 0.0
    rows: float = 0.0
    own: float = 0.0
    """Seconds of work."""
    wall: float = 0.0
    """Seconds of all steps."""

    def since(self, before: Worked) -> Worked:
        """Returns what was done in a window that began with `before`."""
        return Worked(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class OwnTime:
    """Seconds in which the thread that makes this object works, or could not because its process was stalled.

    Args:
        tasks: Folder of the threads of this process.
        clock: Seconds from any start.
    """

    def __init__(self, tasks: Path = TASKS, clock: Callable[[], float] = time.monotonic) -> None:
        self._tasks, self._clock, self._stalled = tasks, clock, 0.0
        self._file = os.open(tasks / str(threading.get_native_id()) / "schedstat", os.O_RDONLY)
        self._ended = False
        self._thread = threading.Thread(target=self._tick, name="pace", daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        """Returns them, from any start."""
        ran, queued = _schedstat(self._file)
        return ran + queued + self._stalled

    def close(self) -> None:
        """Ends the thread."""
        self._ended = True
        self._thread.join()
        os.close(self._file)

    def _tick(self) -> None:
        own = os.open(self._tasks / str(threading.get_native_id()) / "schedstat", os.O_RDONLY)
        before, queued_before, worked_before = self._clock(), _schedstat(own)[1], sum(_schedstat(self._file))
        while not self._ended:
            time.sleep(TICK_S)  # waiting for an event takes several times the processor
            now, queued, worked = self._clock(), _schedstat(own)[1], sum(_schedstat(self._file))
            self._stalled += stalled(now - before, queued - queued_before, worked - worked_before)
            before, queued_before, worked_before = now, queued, worked
        os.close(own)


def stalled(slept: float, queued: float, worked: float) -> float:
    """Returns for how long a process was stalled while a thread of it slept for `TICK_S`, in seconds.

    Args:
        slept: Seconds until it went on.
        queued: Seconds of them in which it was ready, and other work had the core.
        worked: Seconds of them in which the main thread ran or was queued: it may hold the lock of the interpreter meanwhile, which the
            thread waits for.
    """
    late = min(slept - queued - TICK_S, slept - worked)
    return late if late > LATE_S else 0.0


def _schedstat(file: int) -> tuple[float, float]:
    """Returns the seconds that a thread ran, and was queued."""
    ran, queued, *_ = os.pread(file, 64, 0).split()
    return int(ran) / 1e9, int(queued) / 1e9


def is_available(tasks: Path = TASKS) -> bool:
    """Whether the kernel counts what threads run."""
    return (tasks / str(threading.get_native_id()) / "schedstat").exists()


def ratios(windows: Mapping[int, Worked]) -> dict[int, float]:
    """Returns how many times as long as the others each process works, for a step or for a row: the smaller of both.

    Args:
        windows: What each process has done, by rank; at least two.
    """
    each = {rank: (one.own / one.steps, one.own / one.rows) for rank, one in windows.items()}
    found = {}
    for rank, own in each.items():
        others = [of for other, of in each.items() if other != rank]
        found[rank] = min(own[kind] / max(statistics.median(of[kind] for of in others), 1e-9) for kind in (0, 1))
    return found


@dataclass
class _Named:
    """What is known of one process."""

    windows: int = 0
    """Windows in which it was slow, one after another; where it was named, in which it was not."""
    is_slow: bool = False
    is_silent: bool = False


@dataclass
class Judge:
    """Compares the processes of a training, in process 0.

    Args:
        label: Name of the training in messages.
        warn: Takes a line about a process that is slow or silent.
        log: Takes a line about one that no longer is.
        stages: Neighbouring processes that hold stages of one model.
    """

    label: str
    warn: Callable[[str], None]
    log: Callable[[str], None]
    stages: int = 1
    _known: dict[Peer, _Named] = field(default_factory=dict)
    _before: dict[Peer, Worked] = field(default_factory=dict)

    def __call__(self, pulses: Mapping[Peer, Pulse]) -> None:
        """Takes the last numbers of all processes that have sent some; process 0 sends its own now."""
        now = max(pulse.at for pulse in pulses.values())
        done = {peer: Worked(*pulse.values) for peer, pulse in pulses.items() if pulse.values}
        for peer, pulse in pulses.items():
            self._look_at_silence(peer, now - pulse.at)
        begun = self._before.keys() != done.keys()  # some have begun just now
        windows = {} if begun else {peer: one.since(self._before[peer]) for peer, one in done.items()}
        if begun or any(one.steps < 0 for one in windows.values()):  # what came before was of another training
            self._before = done
            return
        if any(one.steps < FEWEST_STEPS or one.rows <= 0 for one in windows.values()):
            return
        self._before = done
        for stage in range(self.stages):
            alike = {peer: one for peer, one in windows.items() if peer.rank % self.stages == stage}
            if len(alike) > 1:
                self._compare(alike)

    def _look_at_silence(self, peer: Peer, seconds: float) -> None:
        known = self._known.setdefault(peer, _Named())
        if seconds >= SILENT_S and not known.is_silent:
            why = "it is stopped, or its machine has too much to do"
            self.warn(f"{self.label}: {named([peer])} has not reported for {seconds:.0f} s: {why}")
        elif seconds < SILENT_S and known.is_silent:
            self.log(f"  {self.label}: {named([peer])} reports again")
        known.is_silent = seconds >= SILENT_S

    def _compare(self, windows: Mapping[Peer, Worked]) -> None:
        found = ratios({peer.rank: one for peer, one in windows.items()})
        for peer, one in windows.items():
            known, ratio, own = self._known[peer], found[peer.rank], one.own / one.steps
            others = statistics.median(other.own / other.steps for who, other in windows.items() if who != peer)
            is_slow = ratio >= RATIO and own - others >= SHARE * one.wall / one.steps
            holds = ratio < RECOVERED if known.is_slow else is_slow
            known.windows = known.windows + 1 if holds else 0
            if known.windows < WINDOWS:
                continue
            known.is_slow, known.windows = not known.is_slow, 0
            if known.is_slow:
                self.warn(
                    f"{self.label}: {named([peer])} works {ratio:.1f} times as long on a step as the others "
                    f"({own:.3g} s, others {others:.3g} s), which wait for it"
                )
            else:
                self.log(f"  {self.label}: {named([peer])} is as fast as the others again")


class Pace:
    """Measures the steps of one training in this process.

    Args:
        own: Measures the work of this thread; None: nothing is measured.
    """

    def __init__(self, own: OwnTime | None) -> None:
        self._own, self._done = own, Worked()
        self._error: Exception | None = None

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Within the block one step takes place.

        Args:
            rows: Rows that this process computes in it.
        """
        if self._error is not None:  # the line could not be written
            raise self._error
        if self._own is None:
            yield
            return
        began, own = time.monotonic(), self._own.seconds()
        yield
        done = self._done
        self._done = replace(
            done,
            steps=done.steps + 1,
            rows=done.rows + max(1, rows),  # who has none runs one that does not count
            own=done.own + self._own.seconds() - own,
            wall=done.wall + time.monotonic() - began,
        )

    def numbers(self) -> tuple[float, ...]:
        """Returns what pulses carry."""
        return astuple(self._done)

    def judged_by(self, judge: Callable[[Mapping[Peer, Pulse]], None]) -> Callable[[Mapping[Peer, Pulse]], None]:
        """Returns a judge that runs in the thread of the lifeline; its exception is raised before the next step."""

        def judged(pulses: Mapping[Peer, Pulse]) -> None:
            try:
                judge(pulses)
            except Exception as error:  # such as a full disk, when the log is written
                self._error = error

        return judged


@contextmanager
def paced(team: Team, label: str, warn: Callable[[str], None], log: Callable[[str], None]) -> Iterator[Pace]:
    """Within the block the processes of a training are compared.

    Args:
        team: The processes.
        label: Name of the training in messages.
        warn: Takes a line about a process that is slow or silent, in process 0; called by another thread.
        log: Takes a line about one that no longer is.
    """
    if team.lifeline is None or not is_available():
        yield Pace(None)
        return
    own = OwnTime()
    pace = Pace(own)
    team.lifeline.gauge = Gauge(pace.numbers, pace.judged_by(Judge(label, warn, log, team.pipeline)))
    try:
        yield pace
    finally:
        team.lifeline.gauge = None
        own.close()
