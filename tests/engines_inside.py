"""Engines inside the process of the tests, for whole runs whose tests are about something else than processes.

A process of torch takes seconds to start, one of another engine most of a second, and a whole run starts a dozen. What passes is the same:
lines of JSON and files, answered by `export.engines.worker`. `tests/export/engines/test_worker.py`, `tests/export/test_export.py` and,
to time them, `tests/test_pipeline.py` start the processes.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

from export.engines.worker import Worker, answer, replied
from foundation.machine.process import spawn


class Inside:
    """Stands for the process of an engine, and for its input and output: what is written is answered at once."""

    def __init__(self) -> None:
        self.stdin = self.stdout = self
        self.closed = False
        self._worker: list[Worker] = []
        self._lines: deque[bytes] = deque()

    def write(self, line: bytes) -> None:
        threads = torch.get_num_threads()
        with torch.random.fork_rng(devices=[]):  # a process has settings and random numbers of its own
            self._tell(replied(partial(answer, self._worker), line, self._tell))
        torch.set_num_threads(threads)

    def _tell(self, line: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(line).encode() + b"\n")

    def flush(self) -> None:
        """Nothing waits to be written."""

    def readline(self) -> bytes:
        return self._lines.popleft()

    def close(self) -> None:
        self.closed = True
        self._worker.clear()

    def kill(self) -> None:
        """It ends when it is closed."""

    def wait(self, timeout: float | None = None) -> int:
        return 0


def start(command: Sequence[str], **settings: Any) -> Any:
    """Stands for `spawn` where engines are started; what is no worker becomes a process."""
    return Inside() if command[-1] == "export.engines.worker" else spawn(command, **settings)


@contextmanager
def inside(outside: Collection[int] = ()) -> Iterator[None]:
    """Opens engines in this process as long as it lasts. Those whose numbers are in `outside`, counted from 0, get processes."""
    numbers = count()

    def chosen(command: Sequence[str], **settings: Any) -> Any:
        return (spawn if next(numbers) in outside else start)(command, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foundation.measure.engine_process.spawn", chosen)
        yield
