"""A constant load of streamed conversations over `/v1/chat/completions`: tokens per second, and the times of their pieces."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import aiohttp

from foundation.artifacts.triton import Load
from triton_repo.generation.client import Samples

PREFIX, DONE = b"data: ", b"[DONE]"


def chat_load(address: str, model: str, questions: Sequence[str], tokens: int, streams: int) -> Load:
    """Asks each question once, so many at a time; every answer has the same length.

    Args:
        address: host:port of HTTP.
        model: Name of the model.
        questions: Each is the message of a user.
        tokens: Tokens of each answer.
        streams: Answers under way at any time.

    Returns:
        The figures, of tokens as `usage` counts them; without times between tokens, as an event may hold several.
    """
    return asyncio.run(_loaded(f"http://{address}/v1/chat/completions", model, questions, tokens, streams))


async def _loaded(url: str, model: str, questions: Sequence[str], tokens: int, streams: int) -> Load:
    samples, feed = Samples(), iter(questions)
    begun = time.perf_counter()

    async def work(session: aiohttp.ClientSession) -> None:
        for question in feed:
            started, first, counted = time.perf_counter(), None, 0
            async with session.post(url, json=_body(model, question, tokens)) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(PREFIX) or line.removeprefix(PREFIX).strip() == DONE:
                        continue
                    event = json.loads(line.removeprefix(PREFIX))
                    if first is None and event["choices"] and event["choices"][0]["delta"].get("content"):
                        first = time.perf_counter()
                    counted += (event.get("usage") or {}).get("completion_tokens", 0)
            assert counted == tokens, f"{counted} tokens came, {tokens} were asked for"
            assert first is not None, "an answer without a text"
            samples.first.append(first - started)
            samples.whole.append(time.perf_counter() - started)
            samples.tokens += counted

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(work(session) for _ in range(streams)))
    return samples.figures(time.perf_counter() - begun).with_(concurrency=streams, answer_tokens=tokens)


def _body(model: str, question: str, tokens: int) -> dict[str, object]:
    settings = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": [{"role": "user", "content": question}], **settings}
