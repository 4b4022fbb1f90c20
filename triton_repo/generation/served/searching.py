"""A search with beams, step by step between the steps of other answers, and the rules of an answer in the words of `decoding_rules`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from .answer import LENGTH, STOP, Answer
from .decoding_rules import Logits, Rules, searching
from .engine import alone

NAMES = ("MAX_TOKENS", "REPETITION_PENALTY", "PRESENCE_PENALTY", "FREQUENCY_PENALTY", "TEMPERATURE", "TOP_K", "TOP_P", "MIN_P", "SEED")


def rules_of(answer: Answer, ends: Iterable[int], first: int | None = None) -> Rules:
    """Returns the rules that choose the tokens of an answer.

    Args:
        answer: The answer.
        ends: Tokens that end an answer of the model.
        first: The first token, if the model fixes it.
    """
    values = answer.request.values
    given = frozenset() if values["IGNORE_EOS"] else frozenset(ends)
    return Rules(ends=given, first=first, **{name.lower(): values[name] for name in NAMES})


class Beams(Protocol):
    """The model with the beams of one search."""

    def step(self, tokens: np.ndarray, order: np.ndarray) -> Logits:
        """Appends tokens [r] to the texts with the numbers `order` [r] of the step before; returns the logits of the next ones [r, V]."""

    def close(self) -> None:
        """Frees what they held."""


class Search:
    """One search under way.

    Args:
        beams: The model.
        answer: What is searched.
        rules: Its rules.
        start: What the model reads first.
        before: What it has read before.
    """

    def __init__(self, beams: Beams, answer: Answer, rules: Rules, start: int, before: Sequence[int] = ()) -> None:
        self._beams, self._answer, self._ends = beams, answer, rules.ends
        values = answer.request.values
        self._steps = searching(rules, start, values["BEAMS"], values["LENGTH_PENALTY"], before)
        self._next = next(self._steps)

    @property
    def answers(self) -> list[Answer]:
        """The answer; none once it has ended."""
        return [] if self._answer.ended else [self._answer]

    def step(self) -> None:
        """Takes a step of the search; gives its answers with the last."""
        with alone(self._answer):  # the beams have a cache of their own
            try:
                self._next = self._steps.send(self._beams.step(*self._next))
            except StopIteration as found:
                best: list[list[int]] = found.value[: self._answer.request.values["ANSWERS"]]
                self._answer.give([(tokens, STOP if tokens[-1] in self._ends else LENGTH) for tokens in best])

    def leave(self) -> None:
        """Does nothing: the one answer is not shared."""

    def close(self) -> None:
        """Frees what the beams held."""
        self._beams.close()
