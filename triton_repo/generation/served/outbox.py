"""The thread that talks to the server, so that the one that generates never waits for it.

A response is handed to another process, which needs a processor to take it. Where the engine holds all of them, that takes milliseconds:
more than a token. What is put here is carried out in its order, by one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

STOP_SECONDS = 30.0


class Outbox:
    """Calls that wait for their turn, and their thread, which runs from the start."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queues a call. The call has to handle its own errors: an exception would end the thread."""
        self._calls.put(call)

    def close(self) -> None:
        """Waits until everything has been carried out; nothing may be put any more."""
        self._calls.put(None)
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
