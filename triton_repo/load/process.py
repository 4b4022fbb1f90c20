"""The process of the generator: `python -m triton_repo.load.process JOB`, a JSON object. Prints one JSON object: the answer, or `problems`.

A separate process shares no interpreter with the caller, so that nothing else delays its event loop, and its time of the
processor belongs only to the generator.

    {"server", "protocol", "tls", "ca", "model"}        finds the model: {"model", "inputs"}
    {..., "rows": FILE, "load": {...}}                  sends the load: figures and {"model", "prepared", "row_bytes"}

Rows come in one random order, again and again, each row once in a round, so that a long load has the lengths of the data. A request of k
rows holds the next k; the last one of a round is filled up from the front. Before the measurement the load runs for a short time uncounted:
connections are opened, and the first request is awaited, so that the server's queue is empty of an earlier load.
"""

from __future__ import annotations

import asyncio
import gc
import json
import select
import selectors
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from foundation.core.errors import InputError
from foundation.measure.engine_process import read_rows
from foundation.standalone.preprocess import Row
from triton_repo.client import parts_of
from triton_repo.load.arrivals import poisson
from triton_repo.load.connection import Address, Connection, Model, Protocol, check_rows
from triton_repo.load.figures import Measured, figures
from triton_repo.load.generator import Failure, Samples, closed_loop, open_loop
from triton_repo.load.settings import Load

WARM_UP_SECONDS = 0.5
MOST_PREPARED_BYTES = 2**28
"""Bytes of rows that are encoded beforehand; of larger data a random part is sent."""


class Job(TypedDict):
    """What the process is to do; the key of the server is in its environment."""

    server: str
    protocol: Protocol
    tls: bool
    ca: str
    model: str | None
    rows: NotRequired[str]
    """File of the rows to send."""
    load: NotRequired[dict[str, Any]]
    """Fields of the `Load`; absent: the model is described."""


class Described(TypedDict):
    """A model."""

    model: str
    inputs: list[str]


class PreciseSelector(selectors.EpollSelector):
    """Waits to the microsecond. epoll rounds up to milliseconds: an answer after 2.3 ms seemed to take 3.9 at the median, and takes 2.7."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits until a file is ready or the time is over; the arguments are as for `selectors.BaseSelector.select`."""
        if timeout is None or timeout > 0:
            select.select([self.fileno()], [], [], timeout)
        return super().select(0)


def drawn(count: int, sizes: Sequence[int], load: Load) -> list[list[int]]:
    """Returns which rows each prepared request holds; requests repeat in this order.

    Args:
        count: Requests that will be sent at most.
        sizes: Bytes of each row.
        load: The load.
    """
    order = np.random.default_rng(load.seed).permutation(len(sizes))
    enough = np.searchsorted(np.cumsum(np.array(sizes)[order]), MOST_PREPARED_BYTES) + 1
    order = order[: max(1, enough)]
    needed = min(count, -(-len(order) // load.rows))
    rounds = np.resize(order, needed * load.rows)
    return [[int(row) for row in request] for request in rounds.reshape(needed, load.rows)]


async def run(job: Job) -> Described | Measured:
    """Does a job; returns its answer.

    Raises:
        InputError: The server, the model or the rows do not fit.
    """
    address = Address(job["protocol"], job["server"], job["tls"], job["ca"])
    async with Connection(address) as asking:
        model = await asking.model(job["model"])
    if "load" not in job:
        return {"model": model.name, "inputs": [*model.inputs]}
    load, rows = Load(**job["load"]), read_rows(Path(job["rows"]))
    check_rows(rows, model)
    sizes = [_size(row) for row in rows]
    most = load.outstanding if load.concurrency is None else load.concurrency
    async with Connection(address, load.timeout_s, most) as connection:
        samples, prepared = await measured(connection, model, load, rows, sizes)
    p50, p90, largest = (int(np.percentile(sizes, percent, method="higher")) for percent in (50, 90, 100))
    return {
        "model": model.name,
        "prepared": prepared,
        "row_bytes": {"p50": p50, "p90": p90, "max": largest},
        **figures(samples, load, connection.changed),
        **({"rows_per_tier": connection.rows_per_tier} if connection.rows_per_tier else {}),  # type: ignore[typeddict-item]
    }


async def measured(connection: Connection, model: Model, load: Load, rows: Sequence[Row], sizes: Sequence[int]) -> tuple[Samples, int]:
    """Warms up and sends the load; returns what happened, and how many requests were prepared.

    Raises:
        InputError: No request is due, or the server does not answer the first one.
    """
    due = None if load.rate is None else poisson(load.rate, load.seconds, load.seed)
    if due is not None and not len(due):
        raise InputError(f"--rate {load.rate:g}", f"no request is due within {load.seconds:g} s", remedy="give more seconds")
    requests = [
        connection.prepare(model.name, [rows[row] for row in some]) for some in drawn(sys.maxsize if due is None else len(due), sizes, load)
    ]

    async def send(index: int) -> Failure | None:
        return await connection.send(requests[index % len(requests)])

    failure = await send(0)
    if failure is not None:
        raise InputError(f"--model {model.name}", f"the first request, of {load.rows} rows, has no answer ({failure.message})")
    await closed_loop(send, load.concurrency or 1, min(WARM_UP_SECONDS, load.seconds))
    connection.rows_per_tier = []
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would stop the event loop
    if due is not None:
        return await open_loop(send, due.tolist(), load.outstanding), len(requests)
    assert load.concurrency is not None, "one of the two"
    return await closed_loop(send, load.concurrency, load.seconds), len(requests)


def _size(row: Row) -> int:
    texts = parts_of(row)
    return sum(len(text.encode("utf-8")) if isinstance(text, str) else len(text) for text in texts)


def main(job: Job) -> None:
    """Does a job and prints its answer, or the problems with it."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(PreciseSelector())) as runner:
        try:
            answer: Mapping[str, object] = runner.run(run(job))
        except InputError as error:
            answer = {"problems": [asdict(problem) for problem in error.problems]}
    print(json.dumps(answer, allow_nan=False), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
