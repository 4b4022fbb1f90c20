"""Conversations and the functions that a model may call, as clients write them: JSON, read and checked.

    MESSAGES   [{"role": "user", "content": "..."}, ...]
    TOOLS      [{"type": "function", "function": {"name": "...", "description": "...", "parameters": {a JSON schema}}}, ...]

A message of an earlier answer may hold calls, and the message after it their results:

    {"role": "assistant", "content": "", "tool_calls": [{"id": "...", "type": "function", "function": {"name": "...", "arguments": {...}}}]}
    {"role": "tool", "content": "...", "tool_call_id": "...", "name": "..."}

Arguments are an object, since chat templates write them as JSON themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MESSAGES, TOOLS = "MESSAGES", "TOOLS"
TEXTS = {"role", "content", "tool_call_id", "name"}
"""Keys of a message whose values are texts; the first two are needed."""
CALLS = "tool_calls"


class Unreadable(ValueError):
    """An input that is not what it has to be; a one-line message."""


def read_messages(text: str) -> list[dict[str, Any]]:
    """Returns the conversation of an input.

    Raises:
        Unreadable: It is none.
    """
    wanted = f'{MESSAGES}: a JSON list of {{"role": "...", "content": "..."}} is expected'
    messages = _list(wanted, text)
    if not messages:
        raise Unreadable(f"{wanted}, with at least one message")
    for number, message in enumerate(messages):
        if not _is_message(message):
            raise Unreadable(f"{wanted}; message {number} is not like that")
    return messages


def read_tools(text: str) -> list[dict[str, Any]]:
    """Returns the functions of an input.

    Raises:
        Unreadable: They are none.
    """
    wanted = f'{TOOLS}: a JSON list of {{"type": "function", "function": {{"name": "...", "parameters": {{...}}}}}} is expected'
    tools = _list(wanted, text)
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not (isinstance(function, dict) and tool.get("type") == "function" and isinstance(function.get("name"), str)):
            raise Unreadable(f"{wanted}; tool {number} is not like that")
    return tools


def first_call(messages: list[dict[str, Any]]) -> int | None:
    """Returns the number of the first message with a call or the result of one; None without any."""
    return next((number for number, one in enumerate(messages) if CALLS in one or one["role"] == "tool"), None)


def _list(wanted: str, text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{wanted}; this is not JSON") from error
    if not isinstance(found, list):
        raise Unreadable(wanted)
    if any("\0" in one or any(0xD800 <= ord(letter) < 0xE000 for letter in one) for one in _texts(found)):
        raise Unreadable(f"{wanted.partition(':')[0]}: holds half a surrogate pair or a zero character")
    return found


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts in a value of JSON."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message) <= TEXTS | {CALLS}:
        return False
    return all(isinstance(message[key], str) for key in TEXTS & set(message)) and (
        CALLS not in message or (isinstance(message[CALLS], list) and bool(message[CALLS]) and all(map(_is_call, message[CALLS])))
    )


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(call.get("id"), str)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
    )
