"""Server-sent events: an answer that goes out in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc
from aiohttp import web

from triton_repo.front.failures import status_and_line
from triton_repo.front.limits import STREAM_IDLE_SECONDS, Rejected


async def send_events(request: web.Request, payloads: AsyncGenerator[str], failed: Callable[[int, str], str]) -> web.StreamResponse:
    """Sends texts as server-sent events; what fails before the first one is raised, and has a status of its own.

    Args:
        request: The request.
        payloads: The texts, each of one line.
        failed: Returns the last text of a stream that fails later, from a status and a message.
    """
    async with aclosing(payloads):
        first = await anext(payloads, None)
        events = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
        await events.prepare(request)
        try:
            if first is not None:
                await _send(events, first)
            async for payload in payloads:
                await _send(events, payload)
        except (Rejected, grpc.aio.AioRpcError, ValueError, TimeoutError) as error:
            refusal = status_and_line(error, request.method)
            assert refusal is not None, "each of these has a status"
            await _send(events, failed(*refusal))
    return events


async def _send(events: web.StreamResponse, payload: str) -> None:
    """Sends an event; a client that does not read it in time is given up."""
    async with asyncio.timeout(STREAM_IDLE_SECONDS):
        await events.write(f"data: {payload}\n\n".encode())
