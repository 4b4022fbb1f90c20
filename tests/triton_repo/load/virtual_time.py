"""An event loop whose clock jumps: waiting takes no time, so that a test of many seconds is exact and quick."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None):
        assert timeout is not None, "everything waits, for nothing"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now

    def block(self, seconds: float) -> None:
        """The loop does nothing for so long, as if its process had been held up."""
        self.jumping.now += seconds


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


def block(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.block(seconds)
