"""What a language model has to do for a labeller: log-probabilities of label words, and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from distill.labeller.prompts import Query
from foundation.core.arrays import Array


@dataclass(frozen=True)
class Asked:
    """A query and the label words that may follow it."""

    query: Query
    words: tuple[str, ...]


@dataclass(frozen=True)
class Sampled:
    """How texts are drawn."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


class Scorer(Protocol):
    """A language model, on this machine or behind an API."""

    def scores(self, asked: Sequence[Asked]) -> Iterator[tuple[list[int], Array]]:
        """Yields the answers to some queries as they come.

        Each is the list of their indices in `asked` and a float32 array [b, 2, W]: the sum of the log-probabilities of the tokens of each
        word, and the number of these tokens.

        Raises:
            InputError: A query does not fit the model, which is reported before any is answered, or the model fails.
        """

    def texts(self, query: Query, count: int, sampled: Sampled) -> list[str | None]:
        """Returns `count` drawn texts; None for a text that did not end within `max_tokens`.

        Raises:
            InputError: The model cannot answer.
        """
