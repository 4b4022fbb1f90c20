"""A constant load of HTTP requests from one process: rows per second, and the times of the requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

Request = tuple[bytes, Mapping[str, str]]
"""A body and its headers."""


def loaded(url: str, requests: Sequence[Request], size: int, seconds: float, under_way: int) -> dict[str, Any]:
    """Keeps requests under way for some seconds; a refused one ends the measurement.

    Args:
        url: Where they go.
        requests: The requests, sent in turn.
        size: Rows of a request.
        seconds: How long requests are sent.
        under_way: Requests under way at any time.
    """
    return asyncio.run(_loaded(url, requests, size, seconds, under_way))


async def _loaded(url: str, requests: Sequence[Request], size: int, seconds: float, under_way: int) -> dict[str, Any]:
    taken: list[float] = []
    started = time.perf_counter()

    async def work(session: aiohttp.ClientSession, first: int) -> None:
        index = first
        while (sent := time.perf_counter()) < started + seconds:
            body, headers = requests[index % len(requests)]
            async with session.post(url, data=body, headers=headers) as response:
                await response.read()
                response.raise_for_status()
            taken.append(time.perf_counter() - sent)
            index += under_way

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(work(session, first) for first in range(under_way)))
    spent = time.perf_counter() - started
    p50, p90, p99 = (round(1e3 * float(value), 3) for value in np.percentile(taken, (50, 90, 99)))
    return {"rows_per_s": round(len(taken) * size / spent, 2), "n": len(taken), "p50_ms": p50, "p90_ms": p90, "p99_ms": p99}
