"""Threads that need Python's lock for a moment, beside an engine whose steps hold it from beginning to end.

Whoever reads a request or sends a response takes the lock several times. If each time has to wait for the end of a step, a request waits
for many steps, and the more so the longer they are. Between two steps the engine therefore lets all guests in, until they have done their
work.
"""

from __future__ import annotations

import threading
import time

TURN_SECONDS = 1e-4
"""How long the lock is given away at a time."""


class Guests:
    """Counts the threads that are in, or about to be."""

    def __init__(self) -> None:
        self.count, self._lock = 0, threading.Lock()
        """How many there are."""

    def enter(self) -> None:
        """Announces work."""
        with self._lock:
            self.count += 1

    def leave(self) -> None:
        """The work is done."""
        with self._lock:
            self.count -= 1

    def let_in(self, seconds: float) -> None:
        """Gives the lock away: once to whoever waits for it, and then until all announced work is done.

        Args:
            seconds: Most time for that.
        """
        until = time.monotonic() + seconds
        time.sleep(TURN_SECONDS)
        while self.count and time.monotonic() < until:
            time.sleep(TURN_SECONDS)
