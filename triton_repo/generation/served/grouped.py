"""Groups of answers of an encoder-decoder: requests that wait together are encoded and decoded together.

    requests that wait ---> a group, encoded once ---> one token of each of its answers with each step ---> ended answers leave it

A request that comes later begins another group, and the groups take turns token by token. A search with beams is a group of its own, whose
rows are its beams; its source is encoded once. An answer is the same whatever group it is in, but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .answer import Answer
from .decoding_rules import Logits, Text
from .encoder_decoder import EncoderDecoder, Group
from .engine import Engine, alone
from .searching import Search, rules_of


@dataclass(frozen=True)
class Special:
    """Ids of special tokens."""

    start: int
    """Start token of the decoder."""
    pad: int
    """Padding token of shorter sources."""
    ends: list[int]
    """End tokens of an answer."""
    first: int | None = None
    """The first token of every answer, if the model fixes it."""


class Grouped(Engine):
    """An engine for groups.

    Args:
        open_graphs: Compiles the model; called again after an error.
        special: Ids of special tokens.
        room: Number of rows: answers that run at once, with all beams of a search.
        max_waiting: Number of answers that wait.
    """

    def __init__(self, open_graphs: Callable[[], EncoderDecoder], special: Special, room: int, max_waiting: int) -> None:
        super().__init__(room, max_waiting)
        self._open, self._special = open_graphs, special
        self._arrived: list[Answer] = []
        self._groups: list[_Steps] = []
        self._renew()

    @property
    def running(self) -> int:
        """Number of answers that run."""
        return len(self._running())

    def _renew(self) -> None:
        self._arrived, self._groups = [], []
        self._model = self._open()

    def _running(self) -> list[Answer]:
        return [*self._arrived, *(answer for group in self._groups for answer in group.answers)]

    def _begin(self, answer: Answer) -> None:
        self._arrived.append(answer)

    def _step(self) -> None:
        """Encodes what has arrived, and generates the next token of every answer."""
        arrived, self._arrived = self._arrived, []
        searches = [answer for answer in arrived if answer.request.values["BEAMS"] > 1]
        together = [answer for answer in arrived if answer not in searches]
        if together:
            self._groups.append(_Writing(self._model.begin([_source(answer) for answer in together]), together, self._special))
        for answer in searches:
            with alone(answer):
                rules = rules_of(answer, self._special.ends, self._special.first)
                self._groups.append(Search(_Beams(self._model.begin([_source(answer)])), answer, rules, self._special.start))
        for group in self._groups:
            group.step()
        self._leave()

    def _drop_due(self) -> None:
        self._end_due()
        self._arrived = [answer for answer in self._arrived if not answer.ended]
        self._leave()

    def _leave(self) -> None:
        """Lets go of answers that have ended, and of groups without any."""
        for group in self._groups:
            group.leave()
            if not group.answers:
                group.close()
        self._groups = [group for group in self._groups if group.answers]


class _Steps(Protocol):
    """A group under way."""

    @property
    def answers(self) -> list[Answer]:
        """Those that have not ended."""

    def step(self) -> None:
        """Generates the next tokens."""

    def leave(self) -> None:
        """Lets go of answers that have ended."""

    def close(self) -> None:
        """Frees what the group held."""


class _Writing:
    """Answers that take one token each with every step."""

    def __init__(self, group: Group, answers: list[Answer], special: Special) -> None:
        self._group, self.answers = group, answers
        self._texts = [Text(rules_of(answer, special.ends, special.first), special.start, structure=answer.structure) for answer in answers]
        self._order = np.arange(len(answers), dtype=np.int32)

    def step(self) -> None:
        """Generates the next token of each answer and passes it on."""
        logits = self._group.step(np.array([text.last for text in self._texts], np.int64), self._order)
        self._order = np.arange(len(self.answers), dtype=np.int32)
        for answer, text, row in zip(self.answers, self._texts, logits, strict=True):
            with alone(answer):
                token = text.take(row)
                answer.take([token], text.ended, row)

    def leave(self) -> None:
        """Lets go of answers that have ended; the rows of the others keep their places in the model."""
        kept = [place for place, answer in enumerate(self.answers) if not answer.ended]
        self.answers, self._texts = [self.answers[place] for place in kept], [self._texts[place] for place in kept]
        self._order = self._order[kept]

    def close(self) -> None:
        """Gives the request of the model back."""
        self._group.__exit__()


class _Beams:
    """The beams of one search."""

    def __init__(self, group: Group) -> None:
        self._group, self._begun = group, False

    def step(self, tokens: np.ndarray, order: np.ndarray) -> Logits:
        """Takes a step of the group; at first all beams continue its one source."""
        order = order if self._begun else np.zeros_like(order)
        self._begun = True
        return self._group.step(tokens, order)

    def close(self) -> None:
        """Gives the request of the model back."""
        self._group.__exit__()


def _source(answer: Answer) -> np.ndarray:
    return np.asarray(answer.request.prompt, np.int32)
