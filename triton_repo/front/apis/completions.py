"""Completions of the API of OpenAI: answers of a language model to a text or a conversation, whole or as server-sent events.

    POST /v1/completions             {"model", "prompt", "max_tokens", "temperature", "stop", "stream", ...}
    POST /v1/chat/completions        {"model", "messages", ...}

The settings are those of `triton_repo.generation.served.request.FIELDS`, under the names that OpenAI and vLLM have for them. Without a
temperature the most likely tokens are taken, as everywhere in this server; settings of the sampling have then no effect. What an answer
has to be, such as JSON of a schema, is in `answer_format`; log-probabilities are in `logprobs`. Several answers (`n`) are as many
requests to the model, which end together when one fails. Functions that the model may call are in `tools`, its calls in `tool_calls`. What
the model cannot do is refused.
Source: https://platform.openai.com/docs/api-reference, as of 2026.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from aiohttp import web
from tritonclient.grpc import service_pb2 as pb

from foundation.core.json_value import Json
from triton_repo.front.apis.answer import Answer, Call
from triton_repo.front.apis.body import read
from triton_repo.front.apis.catalog import Catalog
from triton_repo.front.apis.completion_bodies import ChatBody, CompletionBody, Settings
from triton_repo.front.apis.logprobs import TOKENS, Chosen, chat_logprobs, text_logprobs
from triton_repo.front.apis.messages import conversation
from triton_repo.front.apis.openai import error_document
from triton_repo.front.bodies import compact
from triton_repo.front.events import send_events
from triton_repo.front.generation import generation_request, write_generation
from triton_repo.front.generations import Generations
from triton_repo.front.together import interleaved, together

DONE = "[DONE]"
"""Last event of a stream."""


@dataclass(frozen=True)
class Form:
    """How a route writes an answer."""

    prefix: str
    """First letters of an id."""
    object: str
    """Name of a whole answer."""
    piece: str
    """Name of a piece of one."""
    whole: Callable[[Answer], dict[str, Json]]
    """Returns the keys that hold the text of a whole answer."""
    part: Callable[[Answer], dict[str, Json]]
    """The same for a piece."""
    logprobs: Callable[[Sequence[Chosen]], dict[str, Json]]
    """Returns the log-probabilities of tokens."""
    first: Mapping[str, Json] | None = None
    """Keys of an event before the first piece; None: there is no such event."""

    def choice(self, text: Mapping[str, Json], index: int, answer: Answer) -> dict[str, Json]:
        """Returns a choice.

        Args:
            text: The keys that hold its text.
            index: Its number.
            answer: The answer, or its piece.
        """
        listed = None if answer.logprobs is None else self.logprobs(answer.logprobs)
        return {"index": index, **text, "logprobs": listed, "finish_reason": answer.reason}


def _text(answer: Answer) -> dict[str, Json]:
    return {"text": answer.text}


def _message(answer: Answer) -> dict[str, Json]:
    if not answer.calls:
        return {"message": {"role": "assistant", "content": answer.text}}
    calls: list[Json] = [_call(call) for call in answer.calls]
    return {"message": {"role": "assistant", "content": answer.text or None, "tool_calls": calls}}


def _delta(answer: Answer) -> dict[str, Json]:
    calls: list[Json] = [{"index": call.index, **_call(call)} for call in answer.calls]
    return {"delta": {**({"content": answer.text} if answer.text else {}), **({"tool_calls": calls} if calls else {})}}


def _call(call: Call) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


TEXT_FORM = Form("cmpl", "text_completion", "text_completion", _text, _text, text_logprobs)
FIRST: Mapping[str, Json] = {"delta": {"role": "assistant", "content": ""}}
CHAT_FORM = Form("chatcmpl", "chat.completion", "chat.completion.chunk", _message, _delta, chat_logprobs, FIRST)


class Completions:
    """The handlers.

    Args:
        catalog: The models.
        generations: Answers language models.
    """

    def __init__(self, catalog: Catalog, generations: Generations) -> None:
        self._catalog, self._generations = catalog, generations

    def add(self, router: web.UrlDispatcher) -> None:
        """Adds the routes."""
        router.add_post("/v1/completions", self.completions)
        for path in ("/v1/chat/completions", "/models/{model}/v1/chat/completions"):
            router.add_post(path, self.chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answers to texts."""
        body = CompletionBody.of(await read(request))
        return await self._answered(request, body, body.prompts(), TEXT_FORM)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """The answer to a conversation."""
        body = ChatBody.of(await read(request))
        if "model" in request.match_info:  # clients of Hugging Face write some other word into the body
            body = body.model_copy(update={"model": request.match_info["model"]})
        return await self._answered(request, body, [{"MESSAGES": conversation(body.messages)}], CHAT_FORM)

    async def _answered(
        self, request: web.Request, body: Settings, prompts: Sequence[Mapping[str, Json]], form: Form
    ) -> web.StreamResponse:
        model = await self._catalog.only(lambda one: one.generates, "generate text", body.model)
        choices = body.choices()
        requests = [
            generation_request(model.description, "", {**prompt, **inputs}, stream=body.stream) for prompt in prompts for inputs in choices
        ]
        head: dict[str, Json] = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}

        async def pieces(one: pb.ModelInferRequest) -> AsyncGenerator[Answer]:
            async with aclosing(self._generations.responses(one)) as responses:
                async for response in responses:
                    yield _piece(write_generation(response, model.description))

        sources = [body.read(pieces(one)) for one in requests]
        if not body.stream:
            answers = await _whole(sources)
            written: list[Json] = [form.choice(form.whole(one), index, one) for index, one in enumerate(answers)]
            document = {**head, "object": form.object, "choices": written, "usage": usage(answers, body.n)}
            return web.json_response(document, dumps=compact)
        payloads = _written(sources, {**head, "object": form.piece}, form, body.n if body.stream_options.include_usage else None)
        return await send_events(request, payloads, lambda status, message: compact(error_document(status, message)))


async def _written(
    sources: Sequence[AsyncGenerator[Answer]], head: Mapping[str, Json], form: Form, counted: int | None
) -> AsyncGenerator[str]:
    """Yields the events of a stream.

    Args:
        sources: The answers.
        head: Keys of each event.
        form: How the route writes answers.
        counted: Number of answers to each prompt, for an event with the usage; None: there is no such event.
    """
    last: dict[int, Answer] = {}
    async with aclosing(interleaved(sources)) as pieces:
        async for index, piece in pieces:
            if index not in last and form.first is not None:
                yield compact({**head, "choices": [form.choice(form.first, index, Answer(""))]})
            last[index] = piece
            if (piece.text or piece.logprobs or piece.calls) and piece.reason is not None and form.first is not None:
                yield compact({**head, "choices": [form.choice(form.part(piece), index, replace(piece, reason=None))]})
                piece = Answer("", piece.reason)  # a conversation ends with an event of its own
            yield compact({**head, "choices": [form.choice(form.part(piece), index, piece)]})
    if counted is not None:
        yield compact({**head, "choices": [], "usage": usage([last[index] for index in sorted(last)], counted)})
    yield DONE


def usage(answers: Sequence[Answer], n: int) -> dict[str, Json]:
    """Returns how many tokens were read and written; a prompt counts once for its `n` answers."""
    read_tokens, written = sum(one.prompt_tokens for one in answers[::n]), sum(one.tokens for one in answers)
    return {"prompt_tokens": read_tokens, "completion_tokens": written, "total_tokens": read_tokens + written}


async def _whole(sources: Sequence[AsyncGenerator[Answer]]) -> list[Answer]:
    """Returns each answer whole; when one fails the others end."""

    async def one(pieces: AsyncGenerator[Answer]) -> Answer:
        async with aclosing(pieces):
            answer = [piece async for piece in pieces]
        listed = None if answer[-1].logprobs is None else [token for piece in answer for token in piece.logprobs or ()]
        calls = [call for piece in answer for call in piece.calls]
        return replace(answer[-1], text="".join(piece.text for piece in answer), logprobs=listed, calls=calls)

    return await together(map(one, sources))


def _piece(document: Mapping[str, Json]) -> Answer:
    """Returns a response of the model as an answer."""
    text, reason, listed = document["TEXT"], document.get("FINISH_REASON"), document.get("LOGPROBS")
    numbers = [document.get(name, 0) for name in ("PROMPT_TOKENS", "COMPLETION_TOKENS")]
    read_tokens, written = (number if isinstance(number, int) else 0 for number in numbers)
    logprobs = TOKENS.validate_json(listed) if isinstance(listed, str) else None
    return Answer(str(text), None if reason is None else str(reason), read_tokens, written, logprobs)
