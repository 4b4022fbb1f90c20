"""Sends requests and notes when each was due, sent and answered: an open and a closed loop.

    open     due_i from a schedule; sent at due_i, whatever became of earlier ones      latency_i = answered_i - due_i
    closed   N workers; each sends the next when it has its answer                      latency_i = answered_i - sent_i

In the open loop latency counts from the moment at which a request was *due*. A server that stalls for half a second delays every
request that was due in this time, and each counts. A generator that waits for answers before it sends more, and counts from the sending,
sees the stall once: the requests that it should have sent meanwhile are missing from its figures (coordinated omission). The closed loop is
such a generator. It answers another question: how fast is a server that always has N requests to work on.

At most `most` requests of the open loop are under way. A request that is due beyond that is not sent; it is noted as shed. Whoever reads
the latencies must know their number, since shed requests are those that would have waited longest.

The lag says how well the generator kept up. Open loop: how late each request was sent. Closed loop: how late a clock that ticks next to the
workers was, since a request that follows an answer has no due time of its own. The time comes from the event loop, so that a test can run
both loops on a clock of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["answered", "refused", "timed_out", "failed", "shed"]
ERRORS: tuple[Kind, ...] = ("refused", "timed_out", "failed")
TICK_SECONDS = 0.01


@dataclass(frozen=True)
class Failure:
    """Why a request has no answer."""

    kind: Kind
    """refused: not taken, or its connection was lost; timed_out: not answered in time; failed: answered with an error."""
    message: str
    """One line."""


Send = Callable[[int], Awaitable[Failure | None]]
"""Sends request number i (from 0) and waits for its answer."""


@dataclass
class Samples:
    """Outcome of each request, in the order of their ends; times in seconds since the start."""

    due: list[float] = field(default_factory=list)
    """Closed loop: when it was sent."""
    ended: list[float] = field(default_factory=list)
    """NaN: never sent."""
    kinds: list[Kind] = field(default_factory=list)
    first: dict[Kind, str] = field(default_factory=dict)
    """The first message of each kind of error."""
    lag: list[float] = field(default_factory=list)
    """Delay of the generator in seconds."""
    start: float = 0.0
    """Start on the clock of the event loop."""
    under_way: int = 0
    cpu_seconds: float = 0.0
    """Time of the processor, of all threads of this process, while requests were sent."""
    wall_seconds: float = 0.0
    """How long requests were sent."""

    def add(self, due: float, ended: float, failure: Failure | None) -> None:
        """Records a request."""
        self.due.append(due)
        self.ended.append(ended)
        self.kinds.append("answered" if failure is None else failure.kind)
        if failure is not None:
            self.first.setdefault(failure.kind, failure.message)


async def open_loop(send: Send, due: Sequence[float], most: int) -> Samples:
    """Sends request i at `due[i]` seconds from now, and returns when all have ended.

    Args:
        send: Sends one.
        due: Ascending.
        most: Requests that may be under way; those due beyond are shed.
    """
    clock, samples = asyncio.get_running_loop().time, Samples()

    async def one(index: int, moment: float) -> None:
        samples.lag.append(clock() - samples.start - moment)
        failure = await send(index)
        samples.under_way -= 1
        samples.add(moment, clock() - samples.start, failure)

    async with asyncio.TaskGroup() as group:
        samples.start, cpu = clock(), time.process_time()
        for index, moment in enumerate(due):
            await asyncio.sleep(samples.start + moment - clock())  # also where it is late: answers must be read meanwhile
            if samples.under_way >= most:
                samples.add(moment, float("nan"), Failure("shed", f"{most} requests were under way"))
                continue
            samples.under_way += 1
            group.create_task(one(index, moment))
        samples.cpu_seconds, samples.wall_seconds = time.process_time() - cpu, clock() - samples.start
    return samples


async def closed_loop(send: Send, concurrency: int, seconds: float) -> Samples:
    """Keeps `concurrency` requests under way for `seconds`, and returns when the last has ended."""
    clock, samples, numbers = asyncio.get_running_loop().time, Samples(), itertools.count()
    samples.start, cpu = clock(), time.process_time()

    async def work() -> None:
        while (sent := clock() - samples.start) < seconds:
            failure = await send(next(numbers))
            samples.add(sent, clock() - samples.start, failure)
            await asyncio.sleep(0)  # a request that is refused at once must not keep the loop from the others

    async def tick() -> None:
        while (now := clock() - samples.start) < seconds:
            await asyncio.sleep(min(TICK_SECONDS, seconds - now))
            samples.lag.append(max(0.0, clock() - samples.start - min(now + TICK_SECONDS, seconds)))
        samples.cpu_seconds, samples.wall_seconds = time.process_time() - cpu, clock() - samples.start

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
        group.create_task(tick())
    return samples
