"""An answer of a language model, or its piece, as the routes of OpenAI write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triton_repo.front.apis.logprobs import Chosen


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""
    index: int = 0
    """Its number in the answer."""


@dataclass(frozen=True)
class Answer:
    """An answer, or its piece."""

    text: str
    reason: str | None = None
    """stop, length, timeout, cancelled or tool_calls, in the last piece."""
    prompt_tokens: int = 0
    tokens: int = 0
    logprobs: Sequence[Chosen] | None = None
    """Its tokens with their log-probabilities, where they are asked for."""
    calls: Sequence[Call] = ()
