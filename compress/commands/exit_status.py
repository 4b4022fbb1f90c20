"""How a verb ends: its result or exception as an exit status, and one line on standard error for each problem."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol

import typer

from foundation.core.errors import InputError, Problem
from foundation.machine.faults import LOST, FailedElsewhere, Fault, fault_of, is_lost, line_of
from foundation.machine.lifeline import this_process
from foundation.machine.parallel import is_launched, leave

STATUSES = {
    0: "finished, no goal missed",
    1: "an internal error: our fault (`--verbose` shows where)",
    2: "the input or the machine is wrong, one line for each problem; `verify`: something differs",
    3: "finished and everything is written, but a goal was missed",
    4: "finished and everything is written, but a goal could not be judged because the machine was busy",
    130: "stopped with Ctrl-C; finished stages are kept",
    143: "stopped with SIGTERM; finished stages are kept",
}
"""Meaning of each exit status."""


@dataclass(frozen=True)
class Failure:
    """Why a verb ends without its result."""

    status: int
    """Exit status."""
    kind: Literal["input", "machine", "internal", "stopped"]
    problems: tuple[Problem, ...]
    """Empty where another process of the run reports it."""


class Listener(Protocol):
    """Follows how a verb ends."""

    def failed(self, failure: Failure) -> None:
        """Notes why it ends without a result."""

    def ended(self, status: int) -> None:
        """Notes its exit status; called last, once."""


def finish(work: Callable[[], int | None], verbose: bool = False, listener: Listener | None = None) -> NoReturn:
    """Runs a verb and turns its result or exception into an exit status.

    Args:
        work: The verb; returns its exit status, None for 0.
        verbose: Whether an exception prints its traceback.
        listener: Follows how it ends.
    """
    received: list[int] = []
    try:
        with _stoppable(received):
            status = work() or 0
    except (Exception, KeyboardInterrupt) as error:  # last frame of the program
        stopped = received or isinstance(error, KeyboardInterrupt)  # some libraries turn an interrupt into an error of their own
        failure = _stopped(received) if stopped else failure_of(error)
        status = _say(failure.status, verbose and not stopped, *map(str, failure.problems))
        if listener is not None:
            listener.failed(failure)
    if listener is not None:
        listener.ended(status)
    if is_launched():
        leave(status)
    raise typer.Exit(status)


def end_now(listener: Listener | None, line: str | None) -> NoReturn:
    """Ends one of several processes at once, while its main thread waits for a process that is gone.

    Args:
        listener: Follows how the verb ends.
        line: What is reported; None where another process reports it.
    """
    failure = failure_of(FailedElsewhere() if line is None else Fault(line))
    status = _say(failure.status, False, *map(str, failure.problems))
    if listener is not None:
        listener.failed(failure)
        listener.ended(status)
    leave(status)


@contextmanager
def _stoppable(received: list[int]) -> Iterator[None]:
    """Within the block SIGTERM and Ctrl-C raise KeyboardInterrupt, so that half-written folders are removed.

    Args:
        received: Gets the number of the signal. A second SIGTERM does not disturb the removal.
    """

    def stop(number: int, frame: object) -> NoReturn:
        received.append(number)
        signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else signal.default_int_handler)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(received: list[int]) -> Failure:
    terminated = signal.SIGTERM in received
    how = "stopped with SIGTERM" if terminated else "stopped"
    line = f"{how}; finished stages are kept, run the same command to continue"
    return Failure(143 if terminated else 130, "stopped", (Problem("", line),))


def failure_of(error: BaseException) -> Failure:
    """Returns why an exception ends the verb: wrong input, a fault of the machine, or else an internal error."""
    if isinstance(error, InputError):
        return Failure(2, "input", error.problems)
    if isinstance(error, FailedElsewhere):
        return Failure(1, "internal", ())
    if isinstance(error, Fault):
        return Failure(2, "machine", (Problem("", str(error)),))
    if is_lost(error):
        return Failure(2, "machine", (Problem("", LOST),))
    if (fault := fault_of(error)) is not None:
        return Failure(2, "machine", (Problem("", line_of(fault, this_process() if is_launched() else "")),))
    line = f"internal error: {type(error).__name__}: {error} (--verbose shows the traceback)"
    return Failure(1, "internal", (Problem("", line),))


def _say(status: int, verbose: bool, *lines: str) -> int:
    if verbose:
        traceback.print_exc()
    for line in lines:
        text = " ".join(line.split()) + "\n"
        sys.stderr.write(text.encode(sys.stderr.encoding or "utf-8", "backslashreplace").decode(sys.stderr.encoding or "utf-8"))
    return status
