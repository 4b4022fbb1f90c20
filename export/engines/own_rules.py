"""A `Decoding` in the words of `foundation.standalone.decoding_rules`, for the engines that choose tokens by our rules."""

from __future__ import annotations

from collections.abc import Iterable

from foundation.core.decoding import Decoding
from foundation.standalone.decoding_rules import Rules

SHARED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p", "seed")


def rules_of(decoding: Decoding, ends: Iterable[int], first: int | None = None, room: int | None = None) -> Rules:
    """Returns the rules that choose the tokens of an answer.

    Args:
        decoding: The settings.
        ends: End tokens of the model.
        first: The first token, if the model fixes it.
        room: Most tokens that the model can still read; None: any number.
    """
    tokens = decoding.max_tokens if room is None else min(decoding.max_tokens, room)
    known = frozenset(decoding.stop_tokens) | (frozenset() if decoding.ignore_end else frozenset(ends))
    return Rules(tokens, known, first, **{name: getattr(decoding, name) for name in SHARED})
