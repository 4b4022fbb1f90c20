"""Messages of a conversation, with calls of functions and their results, to the messages that a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from foundation.core.json_value import Json
from triton_repo.front.apis.body import JsonObject
from triton_repo.front.limits import Rejected


class TextPart(JsonObject):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(JsonObject):
    """Name and arguments of a call."""

    name: str
    arguments: str


class MadeCall(JsonObject):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(JsonObject):
    """A message of a conversation. Content may be missing next to calls."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[MadeCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


def _without_nulls(message: Any) -> Any:
    """Returns a message without keys that are null, which count as not given, and without an empty list of calls."""
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None and not (key == "tool_calls" and value == [])}


CleanMessage = Annotated[Message, BeforeValidator(_without_nulls)]


def conversation(messages: Sequence[Message]) -> str:
    """Returns a conversation as the input of a model. The result of a call gets the name of its function, which some templates need.

    Raises:
        Rejected: A message has no content, or keys that its role has not.
    """
    names: dict[str, str] = {}
    made: list[Json] = []
    for number, message in enumerate(messages):
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        made.append(_written(message, number, names))
    return json.dumps(made)


def _written(message: Message, number: int, names: dict[str, str]) -> dict[str, Json]:
    place, result = f"messages.{number}", message.role == "tool"
    if message.content is None and message.tool_calls is None:
        raise Rejected(f"{place}.content: none given; a text is expected")
    if message.tool_calls is not None and message.role != "assistant":
        raise Rejected(f"{place}.tool_calls: given with role {message.role[:64]}; only an assistant makes calls")
    if not result and (message.tool_call_id, message.name) != (None, None):
        raise Rejected(f"{place}: tool_call_id or name given with role {message.role[:64]}; only a message of role tool has them")
    parts = [message.content] if isinstance(message.content, str) else [part.text for part in message.content or ()]
    document: dict[str, Json] = {"role": message.role, "content": "".join(parts)}
    if message.tool_calls is not None:
        document["tool_calls"] = [_call(call, f"{place}.tool_calls.{index}") for index, call in enumerate(message.tool_calls)]
    if message.tool_call_id is not None:
        document["tool_call_id"] = message.tool_call_id
    if result and (name := message.name or names.get(message.tool_call_id or "")) is not None:
        document["name"] = name
    return document


def _call(call: MadeCall, place: str) -> dict[str, Json]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{place}.function.arguments: not JSON") from error
    if not isinstance(arguments, dict):
        raise Rejected(f"{place}.function.arguments: a JSON object is expected")
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
