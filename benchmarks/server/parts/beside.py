"""What a server answers while something is done to it: loads that follow each other until it is done, and their figures together."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from foundation.core.errors import InputError

Figures = Mapping[str, Any]


def beside(send: Callable[[int], Figures], work: Callable[[], Figures], margin_s: float) -> dict[str, Any]:
    """Does something under load; returns what it gave, with the figures of the load as `beside`.

    Args:
        send: Sends the load with this number; returns its figures.
        work: What is done.
        margin_s: Seconds of load before it begins and after it has ended.
    """
    over = threading.Event()

    def until() -> list[Figures]:
        loads: list[Figures] = []
        while not over.is_set() or not loads:
            with contextlib.suppress(InputError):  # the first request of a load was refused: it is sent anew
                loads.append(send(len(loads)))
        return loads

    with ThreadPoolExecutor(1) as pool:
        loads: Future[list[Figures]] = pool.submit(until)
        try:
            time.sleep(margin_s)
            found = work()
            time.sleep(margin_s)
        finally:
            over.set()
        return {**found, "beside": merged(loads.result())}


def merged(loads: Sequence[Figures]) -> dict[str, Any]:
    """Returns the figures of loads that followed each other: sums, the worst p99 and the mean p50."""
    return {
        "n": sum(one["n"] for one in loads),
        "answered": sum(one["answered"] for one in loads),
        "errors": {kind: sum(one["errors"][kind]["n"] for one in loads) for kind in loads[0]["errors"]},
        "first_errors": sorted({about["first"] for one in loads for about in one["errors"].values() if "first" in about}),
        "p50_ms": round(statistics.mean(one["latency_ms"]["p50"] for one in loads), 2),
        "worst_p99_ms": max(one["latency_ms"]["p99"] or one["latency_ms"]["max"] for one in loads),
        "max_ms": max(one["latency_ms"]["max"] for one in loads),
    }
