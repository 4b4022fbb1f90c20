"""Answers that belong together: pieces come as they are ready, and when one fails, or nobody reads on, the others end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from triton_repo.front.together import interleaved


class Told:
    """Answers whose pieces come when an event is set, and that note their end."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def answer(self, name: str, pieces: int, wait: asyncio.Event | None = None, error: str = "") -> AsyncGenerator[str]:
        try:
            for number in range(pieces):
                if wait is not None:
                    await wait.wait()
                yield f"{name}{number}"
            if error:
                raise ValueError(error)
        finally:
            self.ended.append(name)


def test_pieces_come_as_they_are_ready_in_the_order_of_their_answer() -> None:
    async def read() -> list[tuple[int, str]]:
        told, ready = Told(), asyncio.Event()
        found = []
        async for number, piece in interleaved([told.answer("a", 2, ready), told.answer("b", 3), told.answer("c", 0)]):
            found.append((number, piece))
            if piece == "b2":
                ready.set()
        assert sorted(told.ended) == ["a", "b", "c"]
        return found

    assert asyncio.run(read()) == [(1, "b0"), (1, "b1"), (1, "b2"), (0, "a0"), (0, "a1")]


def test_an_error_of_one_ends_the_others() -> None:
    async def read() -> list[str]:
        told = Told()
        with pytest.raises(ValueError, match="broken"):
            async for _ in interleaved([told.answer("a", 1, asyncio.Event()), told.answer("b", 1, error="broken"), told.answer("c", 1000)]):
                pass
        return sorted(told.ended)

    assert asyncio.run(read()) == ["a", "b", "c"]


def test_who_reads_no_further_ends_all() -> None:
    async def read() -> list[str]:
        told = Told()
        async with aclosing(interleaved([told.answer("a", 1, asyncio.Event()), told.answer("b", 1000)])) as pieces:
            async for _ in pieces:
                break
        return sorted(told.ended)

    assert asyncio.run(read()) == ["a", "b"]
