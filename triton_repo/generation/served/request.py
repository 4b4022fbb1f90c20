"""Requests to a language model: their inputs, read and checked.

The prompt is one of three:

    TEXT        text as it is; with CHAT true one message of a user, put through the chat template of the model
    MESSAGES    a conversation, JSON: [{"role": "system", "content": "..."}, ...], put through the chat template
    INPUT_IDS   token ids

A conversation has an input of its own, so that a user who types JSON into TEXT cannot speak as somebody else. TOOLS are functions that the
model may call in its answer; the chat template writes them before a conversation. What marks a call is then part of the text of the answer.
All other inputs are in `FIELDS`; without them the most likely tokens are taken. JSON_SCHEMA or REGEX say what the whole answer has to be
(`structures`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .chat_template import TemplateRefused
from .messages import MESSAGES, TOOLS, Unreadable, first_call, read_messages, read_tools

DEFAULT_TOKENS = 128
MAX_STOPS, MAX_STOP_LETTERS = 16, 256
BYTES_PER_TOKEN = 32
"""A longer prompt than this for each token of the longest context is refused before it is tokenized."""
TEXT, INPUT_IDS, CHAT = "TEXT", "INPUT_IDS", "CHAT"
STOP, STOP_TOKENS = "STOP", "STOP_TOKENS"
JSON_SCHEMA, REGEX = "JSON_SCHEMA", "REGEX"
MOST_BYTES = {JSON_SCHEMA: 2**16, REGEX: 2**13}
"""Longest text of a structure."""
WRONG, BUSY, FAILED = "INVALID_ARG", "UNAVAILABLE", "INTERNAL"
"""Codes of errors, in Triton's words: the request is wrong, there is no room for it, the model failed."""
MODEL_FAILED = "the model failed: "
"""How the refusal begins that is the fault of the model; the front of the server looks for it, since a stream carries no code."""


class Refused(ValueError):
    """A request that cannot be answered; a one-line message."""

    code = WRONG


class Busy(Refused):
    """A request that cannot be answered now."""

    code = BUSY


class Broken(Refused):
    """A request to a model that cannot answer any more."""

    code = FAILED


@dataclass(frozen=True)
class Field:
    """An optional input of one element."""

    name: str
    datatype: str
    """As config.pbtxt spells it."""
    default: Any
    low: float
    high: float
    meaning: str
    least: float = 0.0
    """The least value besides 0."""

    @property
    def allowed(self) -> str:
        """The values that it takes, in words."""
        if self.datatype == "TYPE_BOOL":
            return "true, false"
        return f"{f'0 or {self.least}' if self.least else self.low} to {self.high}"

    def read(self, values: np.ndarray) -> Any:
        """Returns the value.

        Raises:
            Refused: It is not one value, or out of bounds.
        """
        if values.size != 1:
            raise Refused(f"{self.name}: {values.size} values given; one is allowed")
        value = values.reshape(-1)[0].item()
        if self.datatype == "TYPE_BOOL":
            return bool(value)
        kind = np.float32 if self.datatype == "TYPE_FP32" else np.int64  # as the value comes, or a limit would refuse itself
        low, high, least = (kind(limit).item() for limit in (self.low, self.high, self.least))
        if not low <= value <= high or (value and abs(value) < least):  # the first refuses NaN, too
            raise Refused(f"{self.name}: {value:g} given; {self.allowed} is allowed")
        return value


FIELDS = (
    Field(CHAT, "TYPE_BOOL", False, 0, 1, f"true: {TEXT} is one message of a user, put through the chat template"),
    Field("MAX_TOKENS", "TYPE_INT32", None, 1, 2**31 - 1, f"most tokens of the answer; {DEFAULT_TOKENS}, or what the context leaves"),
    Field("TEMPERATURE", "TYPE_FP32", 0.0, 0, 100, "divides the logits before sampling; 0 takes the most likely token", 1e-6),
    Field("TOP_K", "TYPE_INT32", 0, 0, 10_000_000, "samples from the k most likely tokens; 0: from all"),
    Field("TOP_P", "TYPE_FP32", 1.0, 1e-6, 1, "samples from the smallest set of tokens whose probabilities add up to this"),
    Field("MIN_P", "TYPE_FP32", 0.0, 0, 0.999, "samples from tokens with at least this share of the largest probability"),
    Field("REPETITION_PENALTY", "TYPE_FP32", 1.0, 1e-3, 1000, "divides positive and multiplies negative logits of tokens that occurred"),
    Field("PRESENCE_PENALTY", "TYPE_FP32", 0.0, -100, 100, "subtracted from the logits of tokens of the answer; 0 alone in OpenVINO GenAI"),
    Field("FREQUENCY_PENALTY", "TYPE_FP32", 0.0, -100, 100, "the same, times how often they occur in it; 0 alone in OpenVINO GenAI"),
    Field("SEED", "TYPE_INT64", 0, 0, 2**63 - 1, "seed of the sampling"),
    Field(
        "LOGPROBS",
        "TYPE_INT32",
        None,
        0,
        20,
        "gives the log-probability of each token, and of so many most likely ones in its place; left out: of none; not in OpenVINO GenAI",
    ),
    Field("IGNORE_EOS", "TYPE_BOOL", False, 0, 1, "continues past the end token"),
    Field(
        "BEAMS", "TYPE_INT32", 1, 1, 64, "beams of a search, each in a place of its own; above 1 needs STREAM false, and nothing is sampled"
    ),
    Field("ANSWERS", "TYPE_INT32", 1, 1, 64, "answers of a search, best first, one response each; at most BEAMS"),
    Field("LENGTH_PENALTY", "TYPE_FP32", 1.0, -100, 100, "power of the length that the score of a beam is divided by"),
    Field("STREAM", "TYPE_BOOL", True, 0, 1, "false: one response, with the whole answer"),
    Field(
        "PIECE_SECONDS",
        "TYPE_FP32",
        0.1,
        0,
        60,
        "least time between two pieces of an answer: pieces of a fast one have several tokens; 0: a piece for each token",
    ),
    Field(
        "TIMEOUT_SECONDS", "TYPE_FP32", None, 1e-3, 1e6, "ends the answer so long after the request arrived; at most the limit of the model"
    ),
)
SAMPLING = ("TOP_K", "TOP_P", "MIN_P", "SEED")
"""Settings without effect in greedy decoding."""


PENALTIES = ("PRESENCE_PENALTY", "FREQUENCY_PENALTY")


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Returns the ids of a text, as integers that numpy makes an array of."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""

    def decode_calls(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens but those that mark a call."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """Returns a conversation as text; raises TemplateRefused where the template does not take it."""


@dataclass(frozen=True)
class Limits:
    """Limits of a model."""

    context: int
    """Most tokens of prompt and answer together."""
    vocabulary: int
    seconds: float
    """Most time for an answer, with the time that its request waits."""
    chat: bool
    """Whether the model has a chat template."""
    beams: bool
    """Whether it searches with beams."""
    penalizes: bool = False
    """Whether such a search of a decoder takes a repetition penalty."""
    subtracts: bool = True
    """Whether it takes a presence and a frequency penalty."""
    proposes: str = ""
    """Source of proposed tokens: draft, text, or nothing."""
    apart: bool = False
    """Whether prompt and answer have a context each, as in an encoder-decoder."""
    structured: bool = False
    """Whether it takes a JSON schema or a regular expression."""
    scored: bool = False
    """Whether it gives log-probabilities."""
    tools: bool = False
    """Whether its chat template takes functions that it may call."""


@dataclass(frozen=True)
class Wanted:
    """What the whole answer has to be."""

    name: str
    """JSON_SCHEMA or REGEX."""
    text: str
    """The schema, or the expression."""


@dataclass(frozen=True)
class Request:
    """A request that can be answered."""

    prompt: np.ndarray
    """Token ids, int64 [P]."""
    values: Mapping[str, Any]
    """The value of each field; MAX_TOKENS and TIMEOUT_SECONDS are numbers."""
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    wanted: Wanted | None = None
    calls: bool = False
    """Whether functions were given that the answer may call."""

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return bool(self.values["TEMPERATURE"] > 0)


def read(inputs: Mapping[str, np.ndarray], limits: Limits, tokenizer: Tokenizer) -> Request:
    """Reads the inputs of a request.

    Args:
        inputs: Those that were given, by name; texts are arrays of bytes.
        limits: What the model takes.
        tokenizer: The tokenizer of the model.

    Raises:
        Refused: An input is wrong; the message says which.
    """
    values = {field.name: field.read(inputs[field.name]) if field.name in inputs else field.default for field in FIELDS}
    _check_together(inputs, values, limits)
    stop = tuple(_text(STOP, value) for value in inputs.get(STOP, np.empty(0, np.object_)).reshape(-1))
    if len(stop) > MAX_STOPS or not all(1 <= len(text) <= MAX_STOP_LETTERS for text in stop):
        raise Refused(f"{STOP}: at most {MAX_STOPS} texts of 1 to {MAX_STOP_LETTERS} letters are allowed")
    wanted = _wanted(inputs, values, limits)
    stop_tokens = _ids(STOP_TOKENS, inputs.get(STOP_TOKENS, np.empty(0, np.int64)), limits)
    prompt = _prompt(inputs, values[CHAT], limits, tokenizer)
    if limits.apart and len(prompt) > limits.context:
        raise Refused(f"the prompt has {len(prompt)} tokens; {limits.context} are allowed, the context of the model")
    left = limits.context - (1 if limits.apart else len(prompt))  # an encoder-decoder starts its answer with a token of its own
    if left < 1:
        raise Refused(f"the prompt has {len(prompt)} tokens; {limits.context - 1} are allowed, one less than the context of the model")
    if values["MAX_TOKENS"] is None:
        values["MAX_TOKENS"] = min(DEFAULT_TOKENS, left)
    elif values["MAX_TOKENS"] > left:
        before = "" if limits.apart else f"{len(prompt)} tokens of the prompt and "
        asked = f"{before}MAX_TOKENS {values['MAX_TOKENS']}"
        raise Refused(f"{asked} are more than the context of {limits.context} tokens; MAX_TOKENS up to {left} is allowed")
    values["TIMEOUT_SECONDS"] = min(limits.seconds, values["TIMEOUT_SECONDS"] or limits.seconds)
    return Request(prompt, values, stop, tuple(int(token) for token in stop_tokens), wanted, TOOLS in inputs)


def _wanted(inputs: Mapping[str, np.ndarray], values: Mapping[str, Any], limits: Limits) -> Wanted | None:
    """Returns what the answer has to be; None: anything."""
    given = [name for name in (JSON_SCHEMA, REGEX) if name in inputs]
    if not given:
        return None
    name, *more = given
    if more:
        raise Refused(f"{name} and {more[0]} given; one is allowed")
    if not limits.structured:
        raise Refused(
            f"{name}: not offered by OpenVINO GenAI, which serves this model; leave it out, or serve the model with onnxruntime_decoder"
        )
    if values["BEAMS"] > 1:
        raise Refused(f"{name} given with {values['BEAMS']} beams; a search takes none: leave one of them out")
    if values["IGNORE_EOS"]:
        raise Refused(f"{name} given with IGNORE_EOS; such an answer ends where it is complete: leave one of them out")
    texts = inputs[name].reshape(-1)
    if len(texts) != 1:
        raise Refused(f"{name}: {len(texts)} texts given; one is allowed")
    if not 1 <= len(texts[0]) <= MOST_BYTES[name]:
        raise Refused(f"{name}: {len(texts[0])} bytes given; 1 to {MOST_BYTES[name]} are allowed")
    return Wanted(name, _text(name, texts[0]))


def _check_together(inputs: Mapping[str, Any], values: Mapping[str, Any], limits: Limits) -> None:
    if not limits.subtracts and (penalties := [name for name in PENALTIES if values[name] != 0]):
        raise Refused(
            f"{penalties[0]}: {values[penalties[0]]:g} given; 0 is allowed: OpenVINO GenAI, which serves this model, adds it to negative "
            "logits instead of subtracting it; give REPETITION_PENALTY, or serve the model with onnxruntime_decoder"
        )
    if values["LOGPROBS"] is not None and not limits.scored:
        raise Refused(
            "LOGPROBS: not offered by OpenVINO GenAI, which serves this model; leave it out, or serve the model with onnxruntime_decoder"
        )
    if values["TEMPERATURE"] == 0 and (idle := [name for name in SAMPLING if name in inputs]):
        raise Refused(f"{', '.join(idle)} given without TEMPERATURE; nothing is sampled: give a TEMPERATURE above 0, or leave it out")
    if values["TEMPERATURE"] > 0 and limits.proposes == "draft":
        raise Refused(
            f"TEMPERATURE: {values['TEMPERATURE']:g} given; a draft proposes tokens to this model, which are held against the most likely "
            "ones: leave it out"
        )
    if values["BEAMS"] > 1:
        if values["LOGPROBS"] is not None:
            raise Refused(f"LOGPROBS given with {values['BEAMS']} beams; a search gives none: leave one of them out")
        if limits.proposes:
            raise Refused(f"BEAMS: {values['BEAMS']} given; tokens are proposed to this model, which does not search: leave it out")
        if not limits.beams:
            raise Refused(f"BEAMS: {values['BEAMS']} given; this model does not search with beams: leave it out")
        if values["REPETITION_PENALTY"] != 1 and not (limits.apart or limits.penalizes):
            raise Refused(
                f"REPETITION_PENALTY: {values['REPETITION_PENALTY']:g} given with {values['BEAMS']} beams; this model searches without it: "
                "leave one of them out"
            )
        if values["STREAM"] or values["TEMPERATURE"] > 0 or STOP in inputs or STOP_TOKENS in inputs:
            raise Refused(
                f"BEAMS: {values['BEAMS']} given; a search needs STREAM false, and takes neither TEMPERATURE, {STOP} nor {STOP_TOKENS}"
            )
    if values["ANSWERS"] > values["BEAMS"]:
        raise Refused(f"ANSWERS: {values['ANSWERS']} given with {values['BEAMS']} beams; give at least as many BEAMS")


def _prompt(inputs: Mapping[str, np.ndarray], chat: bool, limits: Limits, tokenizer: Tokenizer) -> np.ndarray:
    given = [name for name in (TEXT, MESSAGES, INPUT_IDS) if name in inputs]
    if len(given) != 1:
        raise Refused(f"{' and '.join(given) or 'no prompt'} given; give one of {TEXT}, {MESSAGES} and {INPUT_IDS}")
    if chat and given[0] == INPUT_IDS:
        raise Refused(f"{CHAT} given with {INPUT_IDS}; token ids take no chat template: leave it out")
    if TOOLS in inputs and given[0] != MESSAGES and not chat:
        raise Refused(f"{TOOLS} given with {given[0]}; a chat template writes them: give {MESSAGES}, or set {CHAT}")
    if given[0] == INPUT_IDS:
        return _ids(INPUT_IDS, inputs[INPUT_IDS], limits, least=1)
    values = inputs[given[0]].reshape(-1)
    if len(values) != 1:
        raise Refused(f"{given[0]}: {len(values)} texts given; one is allowed")
    if len(values[0]) > BYTES_PER_TOKEN * limits.context:
        raise Refused(f"{given[0]}: {len(values[0])} bytes given; at most {BYTES_PER_TOKEN * limits.context} are allowed")
    text = _text(given[0], values[0])
    if given[0] != MESSAGES and not chat:
        return _encoded(tokenizer, text, add_special_tokens=True)
    try:
        messages = read_messages(text) if given[0] == MESSAGES else [{"role": "user", "content": text}]
        tools = _tools(inputs, limits)
    except Unreadable as error:
        raise Refused(str(error)) from error
    return _encoded(tokenizer, _chat(messages, tools, limits, tokenizer), add_special_tokens=False)


def _tools(inputs: Mapping[str, np.ndarray], limits: Limits) -> list[dict[str, Any]]:
    """Returns the functions that may be called; empty where none are given."""
    if TOOLS not in inputs:
        return []
    values = inputs[TOOLS].reshape(-1)
    if len(values) != 1:
        raise Refused(f"{TOOLS}: {len(values)} texts given; one is allowed")
    if not limits.tools:
        raise Refused(f"{TOOLS}: the chat template of this model does not mention tools; leave them out")
    if len(values[0]) > BYTES_PER_TOKEN * limits.context:
        raise Refused(f"{TOOLS}: {len(values[0])} bytes given; at most {BYTES_PER_TOKEN * limits.context} are allowed")
    return read_tools(_text(TOOLS, values[0]))


def _chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]], limits: Limits, tokenizer: Tokenizer) -> str:
    if not limits.chat:
        raise Refused(f"{CHAT}, {MESSAGES}: this model has no chat template; give the whole prompt as {TEXT}")
    if not limits.tools and (number := first_call(messages)) is not None:
        raise Refused(f"{MESSAGES}: message {number} is about a call; the chat template of this model does not mention tools")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools)
    except TemplateRefused as error:
        raise Refused(f"the chat template does not take these messages: {error}") from error


def _encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> np.ndarray:
    ids = np.array(tokenizer.encode(text, add_special_tokens=add_special_tokens), np.int64).reshape(-1)
    if not len(ids):
        raise Refused("the prompt has no token; give a text that is not empty")
    return ids


def _text(name: str, value: Any) -> str:
    try:
        text = bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{name}: not UTF-8 text (byte {error.start})") from error
    if "\0" in text:
        raise Refused(f"{name}: holds a zero character")
    return text


def _ids(name: str, values: np.ndarray, limits: Limits, least: int = 0) -> np.ndarray:
    ids = values.astype(np.int64).reshape(-1)
    if not least <= len(ids) <= limits.context:
        raise Refused(f"{name}: {len(ids)} ids given; {least} to {limits.context} are allowed")
    wrong = ids[(ids < 0) | (ids >= limits.vocabulary)]
    if len(wrong):
        raise Refused(f"{name}: {wrong[0]} given; 0 to {limits.vocabulary - 1} is allowed")
    return ids
