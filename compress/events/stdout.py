"""Standard output for events alone."""

from __future__ import annotations

import os
import sys
import threading
from typing import Protocol

from compress.events.model import Event
from foundation.core.errors import InputError


class Unread(InputError):
    """Nobody reads the events any more."""


class Unbuffered(Protocol):
    """A stream of bytes without a buffer."""

    def write(self, data: bytes, /) -> int | None:
        """Writes some of the bytes; returns how many."""


def take_stdout() -> Unbuffered:
    """Returns the standard output of this process as a stream of its own.

    What this process, its libraries in C and its child processes write to standard output from now on goes to standard error, so that no
    line of a library gets between two events. Child processes do not inherit the stream.
    """
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    return open(own, "wb", buffering=0)


class EventStream:
    """Writes events to a stream, one a line, each at once; several threads may write.

    Args:
        stream: The stream. A buffer that cannot be written would be tried again, and fail again, when the process ends.
    """

    def __init__(self, stream: Unbuffered) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._unwritten = b""
        """The rest of a line that a signal has interrupted."""

    def write(self, event: Event) -> None:
        """Writes an event.

        Raises:
            Unread: The reader has closed the stream.
        """
        line = event.line().encode() + b"\n"
        with self._lock:
            self._unwritten += line
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[self._stream.write(self._unwritten) or 0 :]
            except BrokenPipeError as error:
                self._unwritten = b""
                remedy = "finished stages are kept, run the same command to continue"
                raise Unread("standard output", "nobody reads the events any more", remedy=remedy) from error
