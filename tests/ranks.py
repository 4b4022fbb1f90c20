"""Connected processes for a test. They are forked from it: a launcher, and each process that it starts, would import for seconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch

from foundation.machine.parallel import leave

CONTEXT: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")  # CUDA does not survive a fork


def in_ranks(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Calls a function in several processes at once, which `foundation.machine.parallel.joined` connects.

    Args:
        count: Number of processes.
        work: A function of a module.
        arguments: Its arguments, the same in each process.

    Raises:
        AssertionError: One of the processes failed; with its traceback. The others are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    errors = CONTEXT.SimpleQueue()
    ranks = [CONTEXT.Process(target=_rank, args=(rank, count, port, errors, work, arguments)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    try:
        running = ranks
        while running and not any(rank.exitcode for rank in ranks):
            wait([rank.sentinel for rank in running])
            running = [rank for rank in running if rank.exitcode is None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert not any(rank.exitcode for rank in ranks), errors.get() if not errors.empty() else [rank.exitcode for rank in ranks]


def _rank(rank: int, count: int, port: int, errors: Any, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """What one process does."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        work(*arguments)
    except BaseException:
        errors.put(traceback.format_exc()[-3000:])
        leave(1)
    leave(0)
