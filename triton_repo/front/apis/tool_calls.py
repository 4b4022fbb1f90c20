"""Calls of functions in the text of an answer, piece by piece: what is no call goes on as text.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>           Hermes, Qwen 2.5; any number, with text before and between
    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]               Mistral; to the end of the answer
    [TOOL_CALLS]NAME[ARGS]{...}                                        Mistral since 2025; any number, [CALL_ID]ID before [ARGS] or not
    <|python_tag|>{"name": ..., "parameters": {...}}; {...}            Llama 3.1 and later; to the end, the mark may be missing

Each form is read whatever the chat template asks for, `arguments` and `parameters` likewise. Without a mark the whole answer has to be
calls of functions that were given. What looks like a call and is none, such as JSON that is cut off, is text. Spaces before a call are left
out.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from foundation.core.json_value import Json
from foundation.standalone.language_text import CALL_MARKS
from triton_repo.front.apis.answer import Answer, Call
from triton_repo.front.apis.tools import NAME, PARAMETERS

BEGIN, END, LIST, TAG, ID, ARGUMENTS = CALL_MARKS
TO_THE_END = (LIST, TAG)
"""Marks after which nothing but calls comes."""
NAMED = re.compile(rf"\s*([a-zA-Z0-9_.-]{{1,64}})\s*(?:{re.escape(ID)}\s*\w{{1,64}}\s*)?{re.escape(ARGUMENTS)}\s*")
"""What precedes the arguments of a call whose name is no JSON."""
SIGNS = string.ascii_letters + string.digits
ID_SIGNS = 9
"""Signs of the id of a call: the number that chat templates of Mistral ask for."""
STOPPED, CALLED = "stop", "tool_calls"


class Reader(Protocol):
    """Reads calls from the text of one answer."""

    def add(self, text: str) -> tuple[str, list[Call]]:
        """Takes text; returns what of it is certainly no call, and complete calls."""

    def end(self) -> tuple[str, list[Call]]:
        """Returns the rest."""


@dataclass
class MarkedCalls:
    """Reads the forms above.

    Args:
        known: Names of the functions.
    """

    known: Collection[str]
    _waiting: str = ""
    _begun: bool = False
    _found: bool = False

    def add(self, text: str) -> tuple[str, list[Call]]:
        """See `Reader`."""
        self._waiting += text
        content, calls = "", list[Call]()
        mark, place = self._mark()
        while mark == BEGIN and (end := self._waiting.find(END, place)) >= 0:
            before, whole = self._waiting[:place], self._waiting[place : end + len(END)]
            self._waiting = self._waiting[end + len(END) :]
            found = read_calls(whole[len(BEGIN) : -len(END)])
            content += before.rstrip() if found else before + whole
            calls += found
            self._found = self._found or bool(found)
            mark, place = self._mark()
        ready = self._waiting[: self._ready(mark, place)]
        self._waiting = self._waiting[len(ready) :]
        self._begun = self._begun or bool(content or ready)
        return content + ready, calls

    def end(self) -> tuple[str, list[Call]]:
        """See `Reader`."""
        mark, place = self._mark()
        before, rest = self._waiting[:place], self._waiting[place + len(mark) :]
        calls, left = read_calls(rest) if mark else self._bare(), ""
        if mark == LIST and not calls:
            calls, left = read_named_calls(rest)
        if calls:
            return (before.rstrip() if mark else "") + left, calls
        return "" if self._found and not self._waiting.strip() else self._waiting, []

    def _ready(self, mark: str, place: int) -> int:
        """Returns the number of letters at the start that are certainly no call, nor spaces before one."""
        if mark:
            return len(self._waiting[:place].rstrip())
        return 0 if self._is_bare() else len(self._waiting) - self._held()

    def _mark(self) -> tuple[str, int]:
        """Returns the first mark and its place; an empty one and the end without any."""
        places = [(place, mark) for mark in (BEGIN, *TO_THE_END) if (place := self._waiting.find(mark)) >= 0]
        place, mark = min(places, default=(len(self._waiting), ""))
        return mark, place

    def _is_bare(self) -> bool:
        """Whether all of the answer so far may be calls without a mark."""
        return not self._begun and not self._found and self._waiting.lstrip()[:1] in ("{", "")

    def _bare(self) -> list[Call]:
        """Returns calls without a mark."""
        calls = read_calls(self._waiting) if self._is_bare() else []
        return calls if all(call.name in self.known for call in calls) else []

    def _held(self) -> int:
        """Returns the number of letters at the end that may be spaces before a call, or the start of a mark."""
        text = self._waiting
        for size in range(min(len(text), max(map(len, CALL_MARKS)) - 1), 0, -1):
            if any(mark.startswith(text[-size:]) for mark in (BEGIN, *TO_THE_END)):
                return len(text) - len(text[:-size].rstrip())
        return len(text) - len(text.rstrip())


@dataclass
class ForcedCalls:
    """Reads an answer that is calls and nothing else, as `tools` forces it.

    Args:
        name: The function; None: the answer names it.
    """

    name: str | None
    _text: list[str] = field(default_factory=list)

    def add(self, text: str) -> tuple[str, list[Call]]:
        """See `Reader`."""
        self._text.append(text)
        return "", []

    def end(self) -> tuple[str, list[Call]]:
        """See `Reader`; arguments that are cut off are given as they are, a list of calls that is cut off is text."""
        text = "".join(self._text)
        if self.name is not None:
            return "", [made(self.name, text)]
        calls = read_calls(text)
        return ("" if calls else text), calls


def made(name: str, arguments: str) -> Call:
    """Returns a call with an id of its own."""
    return Call("".join(secrets.choice(SIGNS) for _ in range(ID_SIGNS)), name, arguments)


def read_calls(text: str) -> list[Call]:
    """Returns the calls in a text: an object, several with a semicolon between, or a list of objects; none where it is something else."""
    documents: list[Json] = []
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        try:
            document, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        documents += document if isinstance(document, list) else [document]
        text = text[end:].lstrip()
        if text and not text.startswith(";"):
            return []
        text = text[1:].lstrip()
    calls = [_call(document) for document in documents]
    return [call for call in calls if call is not None] if None not in calls else []


def read_named_calls(text: str) -> tuple[list[Call], str]:
    """Returns the calls in a text that follows [TOOL_CALLS], each a name and its arguments, and the rest from the first that is none."""
    calls, decoder = list[Call](), json.JSONDecoder()
    rest = LIST + text
    while rest.startswith(LIST) and (head := NAMED.match(rest, len(LIST))) is not None:
        try:
            arguments, end = decoder.raw_decode(rest, head.end())
        except (ValueError, RecursionError):
            break
        if not isinstance(arguments, dict):
            break
        calls.append(made(head[1], json.dumps(arguments, ensure_ascii=False)))
        rest = rest[end:].lstrip()
    return calls, rest


def _call(document: Json) -> Call | None:
    """Returns the call that an object of JSON is; None if it is none."""
    if not isinstance(document, dict) or not isinstance(name := document.get(NAME), str):
        return None
    arguments = document.get("arguments", document.get(PARAMETERS))
    if isinstance(arguments, str):  # JSON in JSON, as some models write it
        return made(name, arguments)
    return made(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


async def with_calls(pieces: AsyncGenerator[Answer], reader: Reader, *, several: bool) -> AsyncGenerator[Answer]:
    """Yields the pieces of an answer with its calls apart from its text.

    Args:
        pieces: The pieces.
        reader: Reads the calls.
        several: Whether more than one call is passed on; the others are left out.
    """
    count = 0
    async with aclosing(pieces):
        async for piece in pieces:
            text, calls = reader.add(piece.text)
            if piece.reason is not None:
                rest, more = reader.end()
                text, calls = text + rest, calls + more
            first, calls = count, calls if several else calls[: 1 - count]
            count += len(calls)
            reason = CALLED if count and piece.reason == STOPPED else piece.reason
            if text or calls or reason is not None:
                numbered = [replace(call, index=index) for index, call in enumerate(calls, first)]
                yield replace(piece, text=text, reason=reason, calls=numbered)
