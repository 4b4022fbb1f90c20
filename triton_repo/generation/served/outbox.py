"""The threads that talk to the server, so that the one that generates never waits for it.

A response is handed to another process, which needs a processor to take it. Where the engine holds all of them, that takes milliseconds:
more than a token. What is put into one lane here is carried out in its order, by one thread; several lanes wait at one time, each for
responses of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue

from .guests import Guests

STOP_SECONDS = 30.0
LANES = 8


class Lane:
    """Calls that wait for their turn, and their thread, which runs from the start."""

    def __init__(self, guests: Guests) -> None:
        self._guests = guests
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queues a call. The call has to handle its own errors: an exception would end the thread."""
        self._guests.enter()
        self._calls.put(call)

    def end(self) -> None:
        """Nothing may be put any more; what was put is still carried out."""
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Waits until everything has been carried out."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._guests.leave()


class Outbox:
    """The lanes.

    Args:
        guests: Who is to know what waits here.
        lanes: Number of lanes.
    """

    def __init__(self, guests: Guests, lanes: int = LANES) -> None:
        self._lanes = [Lane(guests) for _ in range(lanes)]
        self._turns = itertools.cycle(self._lanes)

    def lane(self) -> Lane:
        """Returns the lane for what has an order of its own, such as the responses to one request; the lanes take turns."""
        return next(self._turns)

    def close(self) -> None:
        """Waits until everything has been carried out; nothing may be put any more."""
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.join(STOP_SECONDS)
