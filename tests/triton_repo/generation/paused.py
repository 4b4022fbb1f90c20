"""An engine of answers that takes its steps when a test lets it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar


class Paused:
    """Mixed into an engine: steps only as often as it is let, or freely."""

    def __init__(self, *given: Any) -> None:
        self.steps = threading.Semaphore(0)
        """Each release is a step."""
        self.free = False
        self.errors: list[Exception] = []
        """What the next steps raise, the last first."""
        super().__init__(*given)

    def _step(self) -> None:
        if self.free or self.steps.acquire(timeout=0.01):
            if self.errors:
                raise self.errors.pop()
            super()._step()


P = TypeVar("P", bound=Paused)


@contextmanager
def running(engine: P) -> Iterator[P]:
    """Starts an engine, and at the end lets it go on until its thread is over."""
    engine.start()
    yield engine
    engine.free = True
    engine.close()
    assert not engine._thread.is_alive()
