"""Answers to several prompts that an engine writes at once: as in a server, an answer that ends makes room for another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from export.engines.ending import Ending
from foundation.core.decoding import Answer, Decoding, TokenCallback
from foundation.standalone.decoding_rules import Rules, Text
from foundation.standalone.language_text import LanguageText

Logits = NDArray[np.float32]


class Cached(Protocol):
    """Texts whose keys and values are in a cache."""

    def read(self, prompts: Sequence[NDArray[np.int32]]) -> Logits:
        """Adds texts after the others; returns the logits of the next token of each, float32 [m, V]."""

    def step(self, tokens: NDArray[np.int64]) -> Logits:
        """Appends one token to each text; returns the logits of the next ones, float32 [r, V]."""

    def keep(self, order: Sequence[int]) -> None:
        """Keeps the texts with these numbers, in this order."""


class Writing:
    """The answers to prompts as they are written.

    Args:
        texts: A cache without a text.
        rows: Most texts at once.
        prompts: Token ids of each.
        rules: How the tokens of each are chosen.
        decoding: The settings that they were made of.
        reader: Returns the decoder from tokens to text.
        on_tokens: Called with tokens as they come.
    """

    def __init__(
        self,
        texts: Cached,
        rows: int,
        prompts: Sequence[NDArray[np.int32]],
        rules: Sequence[Rules],
        decoding: Decoding,
        reader: Callable[[], LanguageText],
        on_tokens: TokenCallback | None,
    ) -> None:
        self._texts, self._rows, self._prompts = texts, rows, prompts
        self._on_tokens = on_tokens or (lambda number, tokens: None)
        self._written = [Text(rule, int(prompt[-1]), before=prompt[:-1].tolist()) for rule, prompt in zip(rules, prompts, strict=True)]
        self._endings = [Ending((), decoding.stop, reader) for _ in prompts]  # the texts know their end tokens
        self._seconds: list[list[float]] = [[] for _ in prompts]
        self._started = time.perf_counter()

    def answers(self) -> list[Answer]:
        """Writes all answers."""
        running, waiting = list[int](), list(range(len(self._prompts)))
        while running or waiting:
            if running:
                logits = self._texts.step(np.array([self._written[number].last for number in running], np.int64))
                running = self._take(running, logits)
            arrived, waiting = waiting[: self._rows - len(running)], waiting[self._rows - len(running) :]
            if arrived:
                logits = self._texts.read([self._prompts[number] for number in arrived])
                before, running = running, [*running, *arrived]
                running = self._take(running, logits, len(before))
        return [Answer((tuple(text.tokens),), tuple(seconds)) for text, seconds in zip(self._written, self._seconds, strict=True)]

    def _take(self, running: list[int], logits: Logits, first: int = 0) -> list[int]:
        """Chooses the next token of the texts from `first` on; drops those that have ended, and returns the others."""
        for number, row in zip(running[first:], logits, strict=True):
            text = self._written[number]
            token = text.take(row)
            self._seconds[number].append(time.perf_counter() - self._started)
            self._on_tokens(number, [token])
            self._endings[number].take([token])
            text.stopped = self._endings[number].ended
        kept = [place for place, number in enumerate(running) if self._written[number].ended is None]
        if len(kept) < len(running):
            self._texts.keep(kept)
        return [running[place] for place in kept]
