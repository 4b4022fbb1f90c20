"""Answers that belong together: when one fails, or the client goes, the others end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

T = TypeVar("T")


async def together(answers: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits several answers at once; returns them in their order."""
    under_way = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return list(await asyncio.gather(*under_way))
    finally:
        for one in under_way:
            one.cancel()


async def interleaved(answers: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yields the pieces of several answers as they come, each with the number of its answer."""
    async with AsyncExitStack() as stack:
        for answer in answers:
            await stack.enter_async_context(aclosing(answer))
        waited = {asyncio.ensure_future(anext(answer, None)): number for number, answer in enumerate(answers)}
        try:
            while waited:
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    piece = task.result()
                    number = waited.pop(task)
                    if piece is not None:
                        waited[asyncio.ensure_future(anext(answers[number], None))] = number
                        yield number, piece
        finally:
            for task in waited:
                task.cancel()
            await asyncio.gather(*waited, return_exceptions=True)
