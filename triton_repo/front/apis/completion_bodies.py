"""Bodies of the completions of OpenAI, to the inputs of a language model (`completions`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import Field

from foundation.core.json_value import Json
from triton_repo.front.apis.answer import Answer
from triton_repo.front.apis.answer_format import Choices, Format, Structured, structure_inputs
from triton_repo.front.apis.body import JsonObject
from triton_repo.front.apis.messages import CleanMessage
from triton_repo.front.apis.openai import Metadata
from triton_repo.front.apis.tool_calls import ForcedCalls, MarkedCalls, Reader, with_calls
from triton_repo.front.apis.tools import Choice, NamedChoice, Tools, tool_inputs
from triton_repo.front.limits import Rejected
from triton_repo.generation.served.request import JSON_SCHEMA, PENALTIES, REGEX, SAMPLING

SETTINGS = ("temperature", *map(str.lower, (*SAMPLING, *PENALTIES)), "repetition_penalty", "ignore_eos")
"""Keys of a request that are inputs of the model, in small letters."""
OTHERS = {JSON_SCHEMA: "response_format, or another structure", REGEX: "another structure", "LOGPROBS": "logprobs"}
"""Keys of requests by inputs of the model that answers with calls do not have."""
MOST_PROMPTS = 64
"""Most answers of a request, to all its prompts."""
MOST_CHOICES = 8
"""Most answers to a prompt."""
MOST_LISTED, MOST_CHAT_LISTED = 5, 20
"""Most tokens in each place of log-probabilities, as OpenAI allows."""


class StreamOptions(JsonObject):
    """What a stream holds besides the answer."""

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
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: Format | None = None
    structured_outputs: Structured | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None

    @property
    def listed(self) -> int | None:
        """Number of most likely tokens in each place, besides the log-probability of each token; None: neither is asked for."""
        return None

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
        if self.listed is not None:
            values["LOGPROBS"] = self.listed
        guided = Structured.model_validate({"json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice})
        values |= structure_inputs(self.response_format, self.structured_outputs, guided)
        stops: list[Json] = [self.stop] if isinstance(self.stop, str) else [*(self.stop or [])]
        return {**values, "STOP": stops, "STREAM": self.stream} if stops else {**values, "STREAM": self.stream}

    def choices(self) -> list[dict[str, Json]]:
        """Returns the inputs of the model for each answer to a prompt: answer i is sampled with `seed` + i, so that it can be repeated."""
        values = self.inputs()
        if self.n == 1 or not self.temperature:
            return [values] * self.n
        return [{**values, "SEED": (self.seed or 0) + index} for index in range(self.n)]

    def read(self, pieces: AsyncGenerator[Answer]) -> AsyncGenerator[Answer]:
        """Returns the pieces of an answer as they are passed on."""
        return pieces


class CompletionBody(Settings):
    """Body of `/v1/completions`."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)] | list[int] | list[list[int]]
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LISTED)] | None = None

    @property
    def listed(self) -> int | None:
        """See `Settings.listed`."""
        return self.logprobs

    def choices(self) -> list[dict[str, Json]]:
        """See `Settings.choices`.

        Raises:
            Rejected: There would be too many answers, or the best of some are asked for.
        """
        prompts = len(self.prompts())
        if prompts * self.n > MOST_PROMPTS:
            raise Rejected(f"n: {self.n} given with {prompts} prompts; at most {MOST_PROMPTS} answers are allowed")
        if self.n > 1 and self.best_of is not None:
            raise Rejected(f"best_of: {self.best_of} given with n {self.n}; all answers are returned: leave it out")
        return super().choices()

    def prompts(self) -> list[dict[str, Json]]:
        """Returns the input of each prompt: a text, or token ids of the model's own tokenizer."""
        if isinstance(self.prompt, str):
            return [{"TEXT": self.prompt}]
        if all(isinstance(one, int) for one in self.prompt):
            return [{"INPUT_IDS": [one for one in self.prompt if isinstance(one, int)]}]
        return [{"TEXT": one} if isinstance(one, str) else {"INPUT_IDS": _ids(one)} for one in self.prompt]


class ChatBody(Settings):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[CleanMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_CHAT_LISTED)] | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True

    @property
    def listed(self) -> int | None:
        """See `Settings.listed`.

        Raises:
            Rejected: Most likely tokens are asked for without log-probabilities.
        """
        if self.top_logprobs and not self.logprobs:
            raise Rejected(f"top_logprobs: {self.top_logprobs} given without logprobs; set logprobs to true, or leave it out")
        return (self.top_logprobs or 0) if self.logprobs else None

    def inputs(self) -> dict[str, Json]:
        """Returns the inputs of the model, without the conversation.

        Raises:
            Rejected: Functions are given with what an answer that calls them cannot have.
        """
        values, called = super().inputs(), tool_inputs(self.tools, self.tool_choice, several=self.parallel_tool_calls)
        if called and (other := next((name for name in (JSON_SCHEMA, REGEX, "LOGPROBS") if name in values), None)) is not None:
            raise Rejected(f"tools: given with {OTHERS[other]}; leave one of them out, or set tool_choice to none")
        if self.max_completion_tokens is not None:
            values["MAX_TOKENS"] = self.max_completion_tokens
        return {**values, **called}

    def read(self, pieces: AsyncGenerator[Answer]) -> AsyncGenerator[Answer]:
        """Returns the pieces of an answer with its calls apart from its text."""
        if not self.tools or self.tool_choice == "none":
            return pieces
        reader: Reader = MarkedCalls({tool.function.name for tool in self.tools})
        if self.tool_choice not in (None, "auto"):
            reader = ForcedCalls(self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None)
        return with_calls(pieces, reader, several=self.parallel_tool_calls)


def _ids(prompt: object) -> list[Json]:
    return [one for one in prompt if isinstance(one, int)] if isinstance(prompt, list) else []
