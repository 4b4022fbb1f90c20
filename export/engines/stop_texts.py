"""Texts that end an answer: looked for in its letters, since one text has many spellings in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def stops(decode: Decode, tokens: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether an answer holds a text that ends it."""
    written = decode(tokens)
    return any(text in written for text in stop)


def before_stop(decode: Decode, tokens: Sequence[int], stop: Sequence[str]) -> tuple[int, ...]:
    """Returns the tokens before the first text that ends the answer; all of them where there is none."""
    lengths = range(1, len(tokens) + 1) if stop else ()
    ended = next((at for at in lengths if stops(decode, tokens[:at], stop)), None)
    if ended is None:
        return tuple(tokens)
    written = decode(tokens[:ended])
    begins = min(written.index(text) for text in stop if text in written)
    kept = next(at for at in range(ended, -1, -1) if len(decode(tokens[:at])) <= begins)
    return tuple(tokens[:kept])
