"""Processes that keep cores busy while something else is measured."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager

PERIOD_S = 0.1


def burn(duty: float) -> None:
    """Computes for a share of every period, until it is ended."""
    while True:
        until = time.perf_counter() + duty * PERIOD_S
        while time.perf_counter() < until:
            pass
        if duty < 1:
            time.sleep((1 - duty) * PERIOD_S)


@contextmanager
def load_of(cores: float) -> Iterator[None]:
    """Keeps so many cores busy inside the block."""
    duties = [1.0] * int(cores) + ([cores % 1] if cores % 1 else [])
    processes = [multiprocessing.get_context("spawn").Process(target=burn, args=(duty,), daemon=True) for duty in duties]
    for process in processes:
        process.start()
    time.sleep(0.5 if processes else 0)  # until they compute
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()
