"""Completions of the API of OpenAI: answers of a language model to a text or a conversation, whole or as server-sent events.

    POST /v1/completions             {"model", "prompt", "max_tokens", "temperature", "stop", "stream", ...}
    POST /v1/chat/completions        {"model", "messages", ...}

The settings are those of `triton_repo.generation.served.request.FIELDS`, under the names that OpenAI and vLLM have for them. Without a
temperature the most likely tokens are taken, as everywhere in this server; settings of the sampling have then no effect. What an answer
has to be, such as JSON of a schema, is in `answer_format`. What the model cannot do (log probabilities, tools, several answers) is refused.
Source: https://platform.openai.com/docs/api-reference, as of 2026.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from foundation.core.json_value import Json
from triton_repo.front.apis.answer_format import Choices, Format, Structured, structure_inputs
from triton_repo.front.apis.body import read
from triton_repo.front.apis.catalog import Catalog
from triton_repo.front.apis.openai import Metadata, error_document
from triton_repo.front.bodies import compact
from triton_repo.front.events import send_events
from triton_repo.front.generation import generation_request, write_generation
from triton_repo.front.generations import Generations
from triton_repo.front.limits import Rejected
from triton_repo.front.together import together
from triton_repo.generation.served.request import PENALTIES, SAMPLING

SETTINGS = ("temperature", *map(str.lower, (*SAMPLING, *PENALTIES)), "repetition_penalty", "ignore_eos")
"""Keys of a request that are inputs of the model, in small letters."""
MOST_PROMPTS = 64
DONE = "[DONE]"
"""Last event of a stream."""


class StreamOptions(BaseModel):
    """What a stream holds besides the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Settings(Metadata):
    """Keys that both routes have."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Literal[1] = 1
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: Format | None = None
    structured_outputs: Structured | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None

    def inputs(self) -> dict[str, Json]:
        """Returns the inputs of the model, without the prompt."""
        values: dict[str, Json] = {key.upper(): getattr(self, key) for key in SETTINGS if getattr(self, key) is not None}
        if not self.temperature:  # clients send settings of the sampling all the same
            for name in SAMPLING:
                values.pop(name, None)
        if self.top_k == -1:  # vLLM's word for all tokens
            values.pop("TOP_K", None)
        if self.max_tokens is not None:
            values["MAX_TOKENS"] = self.max_tokens
        guided = Structured.model_validate({"json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice})
        values |= structure_inputs(self.response_format, self.structured_outputs, guided)
        stops: list[Json] = [self.stop] if isinstance(self.stop, str) else [*(self.stop or [])]
        return {**values, "STOP": stops, "STREAM": self.stream} if stops else {**values, "STREAM": self.stream}


class CompletionBody(Settings):
    """Body of `/v1/completions`."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)] | list[int] | list[list[int]]
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    def prompts(self) -> list[dict[str, Json]]:
        """Returns the input of each prompt: a text, or token ids of the model's own tokenizer."""
        if isinstance(self.prompt, str):
            return [{"TEXT": self.prompt}]
        if all(isinstance(one, int) for one in self.prompt):
            return [{"INPUT_IDS": [one for one in self.prompt if isinstance(one, int)]}]
        return [{"TEXT": one} if isinstance(one, str) else {"INPUT_IDS": _ids(one)} for one in self.prompt]


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str | list[TextPart]

    def written(self) -> dict[str, str]:
        """Returns the message with its text in one piece."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatBody(Settings):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Literal[False] = False
    tools: Annotated[list[str], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None

    def inputs(self) -> dict[str, Json]:
        """Returns the inputs of the model, without the conversation."""
        values = super().inputs()
        return values if self.max_completion_tokens is None else {**values, "MAX_TOKENS": self.max_completion_tokens}


@dataclass(frozen=True)
class Form:
    """How a route writes an answer."""

    prefix: str
    """First letters of an id."""
    object: str
    """Name of a whole answer."""
    piece: str
    """Name of a piece of one."""
    whole: Callable[[str], dict[str, Json]]
    """Returns the keys that hold the text of a whole answer."""
    part: Callable[[str], dict[str, Json]]
    """The same for a piece."""
    first: Mapping[str, Json] | None = None
    """Keys of an event before the first piece; None: there is no such event."""


TEXT_FORM = Form("cmpl", "text_completion", "text_completion", lambda text: {"text": text}, lambda text: {"text": text})
CHAT_FORM = Form(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text}},
    lambda text: {"delta": {"content": text} if text else {}},
    {"delta": {"role": "assistant", "content": ""}},
)


@dataclass(frozen=True)
class Answer:
    """An answer, or its piece."""

    text: str
    reason: str | None = None
    """stop, length, timeout or cancelled, in the last piece."""
    prompt_tokens: int = 0
    tokens: int = 0


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
        messages = json.dumps([message.written() for message in body.messages])
        return await self._answered(request, body, [{"MESSAGES": messages}], CHAT_FORM)

    async def _answered(
        self, request: web.Request, body: Settings, prompts: Sequence[Mapping[str, Json]], form: Form
    ) -> web.StreamResponse:
        model = await self._catalog.only(lambda one: one.generates, "generate text", body.model)
        requests = [generation_request(model.description, "", {**prompt, **body.inputs()}, stream=body.stream) for prompt in prompts]
        head: dict[str, Json] = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}

        async def pieces(index: int) -> AsyncGenerator[Answer]:
            async with aclosing(self._generations.responses(requests[index])) as responses:
                async for response in responses:
                    yield _piece(write_generation(response, model.description))

        if not body.stream:
            answers = await _whole([pieces(index) for index in range(len(requests))])
            choices: list[Json] = [_choice(form.whole(one.text), index, one.reason) for index, one in enumerate(answers)]
            document = {**head, "object": form.object, "choices": choices, "usage": usage(answers)}
            return web.json_response(document, dumps=compact)
        if len(requests) > 1:
            raise Rejected(f"stream: {len(requests)} prompts given; one is allowed in a stream")
        payloads = _written(pieces(0), {**head, "object": form.piece}, form, body.stream_options.include_usage)
        return await send_events(request, payloads, lambda status, message: compact(error_document(status, message)))


async def _written(pieces: AsyncGenerator[Answer], head: Mapping[str, Json], form: Form, include_usage: bool) -> AsyncGenerator[str]:
    """Yields the events of a stream."""
    last, begun = Answer(""), False
    async with aclosing(pieces):
        async for piece in pieces:
            if not begun and form.first is not None:
                yield compact({**head, "choices": [_choice(form.first, 0, None)]})
            begun, last = True, piece
            if piece.text and piece.reason is not None and form.first is not None:  # a conversation ends with an event of its own
                yield compact({**head, "choices": [_choice(form.part(piece.text), 0, None)]})
                piece = Answer("", piece.reason)
            yield compact({**head, "choices": [_choice(form.part(piece.text), 0, piece.reason)]})
    if include_usage:
        yield compact({**head, "choices": [], "usage": usage([last])})
    yield DONE


def usage(answers: Sequence[Answer]) -> dict[str, Json]:
    """Returns how many tokens were read and written."""
    read_tokens, written = sum(one.prompt_tokens for one in answers), sum(one.tokens for one in answers)
    return {"prompt_tokens": read_tokens, "completion_tokens": written, "total_tokens": read_tokens + written}


async def _whole(sources: Sequence[AsyncGenerator[Answer]]) -> list[Answer]:
    """Returns each answer whole; when one fails the others end."""

    async def one(pieces: AsyncGenerator[Answer]) -> Answer:
        async with aclosing(pieces):
            answer = [piece async for piece in pieces]
        return replace(answer[-1], text="".join(piece.text for piece in answer))

    return await together(map(one, sources))


def _piece(document: Mapping[str, Json]) -> Answer:
    """Returns a response of the model as an answer."""
    text, reason = document["TEXT"], document.get("FINISH_REASON")
    numbers = [document.get(name, 0) for name in ("PROMPT_TOKENS", "COMPLETION_TOKENS")]
    read_tokens, written = (number if isinstance(number, int) else 0 for number in numbers)
    return Answer(str(text), None if reason is None else str(reason), read_tokens, written)


def _choice(text: Mapping[str, Json], index: int, reason: str | None) -> dict[str, Json]:
    return {"index": index, **text, "logprobs": None, "finish_reason": reason}


def _ids(prompt: object) -> list[Json]:
    return [one for one in prompt if isinstance(one, int)] if isinstance(prompt, list) else []
