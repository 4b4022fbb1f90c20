"""Short text for messages from values and errors of any size: bounded work, no memory addresses, nothing that a terminal would act on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath

LONGEST_INTEGER_BITS = 12_000
"""Python refuses to write larger integers in decimal."""
_USER = re.compile(r"://[^\s'\"]*@|://[^/\s'\"]*:[^\s'\"]*(?=\.\.\.$)")
_QUERY = re.compile(r"(://[^\s'\"?#]*[?#])[^\s'\"]+")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def shown(value: object, limit: int = 60) -> str:
    """Returns the start of a value's `repr`, at most `limit` characters.

    The work is bounded by `limit`, not by the value: a few lines of YAML aliases may stand for billions of entries. An object that is not
    plain data is named by its type.
    """
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return text[: limit - 3] + "..."
    return text


def without_credentials(text: str) -> str:
    """Returns a text with `...` in place of user, password and query of the addresses in it; the start of a long address is cut, too."""
    hidden = _USER.sub("://...", text)
    return _QUERY.sub(r"\1...", hidden)


def reason(error: BaseException, limit: int = 160) -> str:
    """Returns why a library or the operating system failed, as one line without memory addresses."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    line = " ".join(_ADDRESS.sub("", str(text)[: 20 * limit]).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def pasted(*words: object) -> str:
    """Returns a command that can be pasted into a shell, whatever characters its paths have."""
    return shlex.join(str(word) for word in words)


def _pieces(value: object, limit: int) -> Iterator[str]:
    if isinstance(value, str | bytes):
        yield repr(value[: limit + 1])
    elif isinstance(value, bool | float) or value is None:
        yield repr(value)
    elif isinstance(value, int):
        large = value.bit_length() > LONGEST_INTEGER_BITS
        yield f"an integer of {value.bit_length()} bits" if large else repr(value)
    elif isinstance(value, PurePath):
        yield repr(str(value)[: limit + 1])
    elif isinstance(value, Mapping):
        yield "{"
        for position, (key, inner) in enumerate(value.items()):
            yield ", " if position else ""
            yield from _pieces(key, limit)
            yield ": "
            yield from _pieces(inner, limit)
        yield "}"
    elif isinstance(value, list | tuple | set | frozenset):
        opening, closing = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        yield opening
        for position, inner in enumerate(value):
            yield ", " if position else ""
            yield from _pieces(inner, limit)
        yield ",)" if isinstance(value, tuple) and len(value) == 1 else closing
    else:
        yield f"<{type(value).__name__}>"


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: half of a pair, as the JSON escape "\\ud800" is, cannot, and tokenizers reject it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
