"""Answers that belong together: when one fails, or the client goes, the others end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
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
