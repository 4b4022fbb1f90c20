"""Which process of a training is slow."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.machine.lifeline import Peer, Pulse
from foundation.machine.parallel import ALONE
from foundation.training.processes import pace
from foundation.training.processes.pace import LATE_S, SILENT_S, TICK_S, WINDOWS, Judge, OwnTime, Pace, Worked, paced, ratios, stalled
from tests.ranks import CONTEXT


class Heard:
    """Takes the lines of a judge."""

    def __init__(self, size: int, stages: int = 1) -> None:
        self.warned: list[str] = []
        self.logged: list[str] = []
        self.judge = Judge("finetune", self.warned.append, self.logged.append, stages)
        self.done = [Worked()] * size
        self.now = 0.0

    def window(self, own: Sequence[float], steps: int = 20, rows: Sequence[int] | None = None, step_s: float | None = None) -> None:
        """All processes take some steps, with so many seconds of work in each, and so many rows."""
        wall = step_s or max(own)
        rows = rows or [8] * len(own)
        self.now += steps * wall
        self.done = [
            Worked(one.steps + steps, one.rows + steps * each, one.own + steps * work, one.wall + steps * wall)
            for one, work, each in zip(self.done, own, rows, strict=True)
        ]
        self.pulse()

    def pulse(self, silent: Sequence[int] = (), seconds: float = 0.0) -> None:
        self.now += seconds
        self.sent = {
            rank: self.sent[rank] if rank in silent else Pulse(self.now, (one.steps, one.rows, one.own, one.wall))
            for rank, one in enumerate(self.done)
        }
        self.judge({Peer(rank, f"node-{rank // 2}"): pulse for rank, pulse in self.sent.items()})


def test_a_slow_process_is_named_after_two_windows_with_its_machine() -> None:
    heard = Heard(4)
    heard.pulse()
    heard.window([0.2, 0.21, 0.2, 0.19])
    for number in range(WINDOWS + 3):
        assert len(heard.warned) == (number >= WINDOWS)
        heard.window([0.2, 0.21, 0.2, 0.42])
    (line,) = heard.warned
    assert "process 3 on node-1" in line
    assert "2.1 times" in line
    assert "0.42 s" in line
    assert "0.2 s" in line
    heard.window([0.2, 0.21, 0.2, 0.2])
    assert not heard.logged
    heard.window([0.2, 0.21, 0.2, 0.2])
    assert len(heard.logged) == len(heard.warned) == 1
    assert "process 3 on node-1" in heard.logged[0]
    for _ in range(WINDOWS):
        heard.window([0.2, 0.21, 0.2, 0.42])
    assert len(heard.warned) == 2


def test_one_slow_window_is_no_slow_process() -> None:
    heard = Heard(2)
    for number in range(12):
        heard.window([0.2, 0.9 if number % 2 else 0.2])
    assert not heard.warned


@given(st.integers(2, 9), st.integers(0, 2**32), st.floats(0.001, 3.0))
def test_balanced_processes_are_never_named(size: int, seed: int, step_s: float) -> None:
    draw, heard = random.Random(seed), Heard(size)
    for _ in range(30):
        own = [step_s * draw.uniform(0.85, 1.15) for _ in range(size)]
        heard.window(own, steps=draw.randint(2, 50), step_s=1.4 * step_s)
    assert not heard.warned


def test_who_has_more_rows_by_the_number_of_processes_is_not_slow() -> None:
    heard = Heard(2)
    for _ in range(6):
        heard.window([0.4, 0.2], rows=[2, 1])  # three rows for two processes
    assert not heard.warned
    for _ in range(6):
        heard.window([0.4, 0.2], rows=[1, 1])
    assert "process 0" in heard.warned[0]


def test_small_differences_in_steps_that_wait_for_something_else_are_not_named() -> None:
    heard = Heard(2)
    for _ in range(6):
        heard.window([0.02, 0.05], step_s=1.0)
    assert not heard.warned


def test_stages_of_a_pipeline_are_compared_with_the_same_stage() -> None:
    heard = Heard(4, stages=2)
    for _ in range(6):
        heard.window([0.1, 0.3, 0.1, 0.3])
    assert not heard.warned
    for _ in range(6):
        heard.window([0.1, 0.3, 0.2, 0.3])
    assert "process 2" in heard.warned[0]
    alone = Heard(2, stages=2)
    for _ in range(6):
        alone.window([0.1, 0.9])
    assert not alone.warned


def test_windows_wait_for_steps() -> None:
    heard = Heard(2)
    for _ in range(40):
        heard.window([30.0, 10.0], steps=1)
    assert len(heard.warned) == 1


def test_a_process_that_has_never_sent_anything_is_named() -> None:
    heard = Heard(1)
    peers = [Peer(0, "node-0"), Peer(1, "node-1")]
    for seconds in (0.0, 10.0, 20.0, SILENT_S, 40.0):
        heard.judge({peers[0]: Pulse(seconds, (seconds, seconds, seconds, seconds)), peers[1]: Pulse(0.0, ())})
    assert ["process 1 on node-1" in line for line in heard.warned] == [True]


def test_numbers_of_an_earlier_training_are_forgotten() -> None:
    heard = Heard(2)
    heard.done = [Worked(), Worked(900, 900, 900.0, 900.0)]  # a pulse that came late
    heard.pulse()
    heard.done = [Worked()] * 2
    for _ in range(WINDOWS + 2):
        heard.window([0.2, 0.42])
    assert len(heard.warned) == 1


def test_a_process_that_sends_nothing_is_named_once() -> None:
    heard = Heard(3)
    heard.pulse()
    heard.pulse(silent=[1], seconds=SILENT_S - 1)
    assert not heard.warned
    for _ in range(3):
        heard.pulse(silent=[1], seconds=10)
    (line,) = heard.warned
    assert "process 1 on node-0" in line
    heard.pulse()
    assert "reports again" in heard.logged[0]


@given(st.dictionaries(st.integers(0, 8), st.tuples(st.integers(1, 9), st.integers(1, 9), st.floats(0.01, 9)), min_size=2))
def test_a_ratio_is_of_the_median_of_the_others(done: dict[int, tuple[int, int, float]]) -> None:
    found = ratios({rank: Worked(steps, rows, own, own) for rank, (steps, rows, own) in done.items()})
    for rank, (steps, rows, own) in done.items():
        of_steps = statistics.median(other[2] / other[0] for who, other in done.items() if who != rank)
        of_rows = statistics.median(other[2] / other[1] for who, other in done.items() if who != rank)
        assert found[rank] == pytest.approx(min(own / steps / of_steps, own / rows / of_rows))


def test_only_a_late_thread_that_was_not_queued_was_stalled() -> None:
    assert stalled(TICK_S, 0.0, 0.0) == 0.0
    assert stalled(TICK_S + LATE_S / 2, 0.0, 0.0) == 0.0
    assert stalled(TICK_S + 0.5, 0.0, 0.0) == pytest.approx(0.5)
    assert stalled(TICK_S + 0.5, 0.4, 0.0) == pytest.approx(0.1)
    assert stalled(TICK_S + 0.5, 0.5, 0.0) == 0.0
    assert stalled(TICK_S + 0.5, 0.0, TICK_S + 0.5) == 0.0  # the main thread had the lock of the interpreter
    assert stalled(TICK_S + 0.5, 0.0, 0.2) == pytest.approx(TICK_S + 0.3)


def test_what_the_kernel_counts_is_read(tmp_path: Path) -> None:
    (tmp_path / "schedstat").write_text("3000000000 500000000 77\n")
    file = os.open(tmp_path / "schedstat", os.O_RDONLY)
    assert pace._schedstat(file) == (3.0, 0.5)
    os.close(file)


def _sleeps(seconds: float, told: object) -> None:
    own = OwnTime()
    before = own.seconds()
    told.put(0.0)  # type: ignore[attr-defined]
    time.sleep(seconds)
    told.put(own.seconds() - before)  # type: ignore[attr-defined]
    own.close()


def test_a_process_that_is_stopped_works_and_one_that_sleeps_does_not() -> None:
    told = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=_sleeps, args=(2.0, told))
    process.start()
    told.get()
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    time.sleep(1.0)
    stopped = time.monotonic() - stopped
    os.kill(process.pid, signal.SIGCONT)
    own = told.get()
    process.join()
    assert 0.8 * stopped < own < 1.5 * stopped  # of the two seconds that the thread slept


def test_a_training_alone_measures_nothing() -> None:
    with paced(ALONE, "finetune", str, str) as measured, measured.step(3):
        pass
    assert measured.numbers() == (0.0, 0.0, 0.0, 0.0)


def test_steps_and_their_work_are_counted() -> None:
    class Own:
        now = 0.0

        def seconds(self) -> float:
            self.now += 2.5
            return self.now

    measured = Pace(Own())  # type: ignore[arg-type]
    for rows in (3, 0, 5):
        with measured.step(rows):
            pass
    steps, rows, own, wall = measured.numbers()
    assert (steps, rows, own) == (3, 9, 7.5)
    assert wall > 0


def test_an_error_of_the_judge_ends_the_training() -> None:
    def full(line: str) -> None:
        raise OSError(28, "No space left on device")

    measured = Pace(None)
    judge = measured.judged_by(Judge("finetune", full, full))
    judge({Peer(0, "a"): Pulse(100.0, (1, 1, 1, 1)), Peer(1, "b"): Pulse(0.0, (1, 1, 1, 1))})
    with pytest.raises(OSError, match="No space left"), measured.step(1):
        pass
