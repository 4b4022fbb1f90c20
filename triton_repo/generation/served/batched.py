"""Continuous batching over the texts of one cache: every step writes the next token of all answers; answers come and go between steps.

    arrived ---> prompt read, short ones together, a long one part by part between the steps ---> written ---> ended

Row i of the cache is text i: those that are written, in the order in which they came, then the one whose prompt is being read. A search
with beams has a cache of its own. Its prompt is read as a long one is.

The decoder says how prompts are read: `onnx_decoder` in parts, a plan on the fused kernels (`kernels`) whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .answer import Answer
from .decoding_rules import Logits, Text
from .engine import Engine, alone
from .searching import Beams, Search, rules_of


class Texts(Protocol):
    """Texts of one cache, in the order in which they came."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that have been read of each."""

    def read(self, prompts: Sequence[np.ndarray]) -> Logits:
        """Adds texts after the others; returns the logits of the next token of each, float32 [m, V]."""

    def extend(self, row: int, ids: np.ndarray) -> Logits:
        """Appends tokens to one text, or begins it; returns the logits of the next one, float32 [V]. For decoders that read in parts."""

    def step(self, tokens: np.ndarray) -> Logits:
        """Appends one token to each of the first r texts; returns the logits of the next ones, float32 [r, V]."""

    def keep(self, order: Sequence[int]) -> None:
        """Keeps the texts with these numbers, in this order."""


class Reading(Beams, Protocol):
    """Beams whose prompt is read part by part before their first step."""

    def read(self) -> bool:
        """Reads the next part; returns whether all has been read."""


class Decoder(Protocol):
    """A model that writes texts."""

    @property
    def part(self) -> int | None:
        """Most tokens of a prompt that are read at once; None: all are."""

    def texts(self) -> Texts:
        """Returns a cache without a text."""

    def beams(self, before: Sequence[int]) -> Reading:
        """Returns the beams of a search behind a prompt, in a cache of their own. For decoders that search."""

    def groups(self, prompts: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
        """Yields prompts that are read together, in their order."""


@dataclass
class _Written:
    """An answer and its text."""

    answer: Answer
    text: Text
    prompt: np.ndarray
    """Unread rest of its prompt, int64."""

    def take(self, logits: Logits) -> None:
        """Chooses the next token and passes it on."""
        with alone(self.answer):
            token = self.text.take(logits)
            self.answer.take([token], self.text.ended, logits)


@dataclass
class _Searched:
    """A search, and the beams that read its prompt."""

    answer: Answer
    search: Search
    beams: Reading


class Batched(Engine):
    """An engine for texts.

    Args:
        open_decoder: Opens the model; called again after an error.
        ends: Tokens that end an answer.
        room: Number of rows: answers that run at once, with all beams of a search.
        max_waiting: Number of answers that wait.
    """

    def __init__(self, open_decoder: Callable[[], Decoder], ends: Collection[int], room: int, max_waiting: int) -> None:
        super().__init__(room, max_waiting)
        self._open, self._ends = open_decoder, ends
        self._renew()

    @property
    def running(self) -> int:
        """Number of answers that run."""
        return len(self._running())

    def _renew(self) -> None:
        self._arrived: list[_Written | _Searched] = []
        self._reading: list[_Written] = []
        self._preparing: list[_Searched] = []
        """Whose prompts are being read: one at most in both."""
        self._written: list[_Written] = []
        self._searches: list[Search] = []
        self._decoder = self._open()
        self._texts = self._decoder.texts()

    def _running(self) -> list[Answer]:
        texts = [one.answer for one in (*self._arrived, *self._reading, *self._preparing, *self._written)]
        return [*texts, *(answer for search in self._searches for answer in search.answers)]

    def _begin(self, answer: Answer) -> None:
        prompt = np.asarray(answer.request.prompt, np.int64)
        before, start, rules = prompt[:-1].tolist(), int(prompt[-1]), rules_of(answer, self._ends)
        if answer.request.values["BEAMS"] > 1:
            beams = self._decoder.beams(before)
            self._arrived.append(_Searched(answer, Search(beams, answer, rules, start, before), beams))
        else:
            self._arrived.append(_Written(answer, Text(rules, start, before=before, structure=answer.structure), prompt))

    def _step(self) -> None:
        """Writes the next token of every answer, then reads prompts."""
        if self._written:
            logits = self._texts.step(np.array([one.text.last for one in self._written], np.int64))
            for one, row in zip(self._written, logits, strict=True):
                one.take(row)
            self._leave()
        self._read()
        for search in self._searches:
            search.step()
        self._leave()

    def _read(self) -> None:
        """Reads the next part of a long prompt or of the prompt of a search, or the short ones that have arrived first."""
        if not (self._reading or self._preparing) and self._arrived:
            self._choose()
        if self._preparing:
            self._prepare(*self._preparing)
        elif self._reading:
            (one,) = self._reading
            part = self._decoder.part
            logits = self._texts.extend(len(self._written), one.prompt[:part])
            one.prompt = one.prompt[part:]
            if not len(one.prompt):
                self._reading = []
                self._written.append(one)
                one.take(logits)
        elif self._arrived:
            texts = _before_a_search(self._arrived)
            group = next(self._decoder.groups([one.prompt for one in texts]))
            logits = self._texts.read(group)  # an error fails them too, as long as they are among those that have arrived
            new, self._arrived = texts[: len(group)], self._arrived[len(group) :]
            self._written += new
            for one, row in zip(new, logits, strict=True):
                one.take(row)

    def _choose(self) -> None:
        """Begins to read the first prompt, if it is read by itself."""
        first, part = self._arrived[0], self._decoder.part
        if isinstance(first, _Searched):
            self._preparing = [first]
        elif part is not None and len(first.prompt) > part:
            self._reading = [first]
        else:
            return
        self._arrived = self._arrived[1:]

    def _prepare(self, one: _Searched) -> None:
        """Reads the next part of the prompt of a search."""
        with alone(one.answer):
            if one.beams.read():
                self._preparing = []
                self._searches.append(one.search)

    def _drop_due(self) -> None:
        self._end_due()
        self._leave()

    def _leave(self) -> None:
        """Lets go of answers that have ended; the others keep what was read of them."""
        self._arrived = [one for one in self._arrived if not one.answer.ended]
        rows = [*self._written, *self._reading][: len(self._texts.lengths)]  # one that is to be read may have no row yet
        kept = [row for row, one in enumerate(rows) if not one.answer.ended]
        if len(kept) < len(rows):
            self._texts.keep(kept)
        self._written, self._reading = ([one for one in ones if not one.answer.ended] for ones in (self._written, self._reading))
        self._preparing = [one for one in self._preparing if not one.answer.ended]
        self._searches = [search for search in self._searches if search.answers]


def _before_a_search(arrived: Sequence[_Written | _Searched]) -> list[_Written]:
    """Returns the texts before the first search."""
    texts = []
    for one in arrived:
        if isinstance(one, _Searched):
            break
        texts.append(one)
    return texts
