"""Where an answer ends, found outside of the engine.

Where tokens are proposed, OpenVINO GenAI 2026.4 does not know the end tokens of the model, passes over stop texts that lie within proposed
tokens, and fails at some of them. It therefore generates on there, and its answers are cut here: behind the first end token, or before the
first stop text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from export.engines.stop_texts import Decode, before_stop, stops


@dataclass(frozen=True)
class Ends:
    """What ends an answer."""

    tokens: frozenset[int]
    """Token ids; the answer holds the one that ends it."""
    texts: tuple[str, ...]
    """Texts; they are no part of the answer."""
    decode: Decode
    """Returns the text of ids."""

    def cut(self, answer: Sequence[int]) -> tuple[int, ...] | None:
        """Returns the tokens of an answer that has ended; None where it goes on."""
        at = next((at for at, token in enumerate(answer) if token in self.tokens), None)
        within = tuple(answer) if at is None else tuple(answer[: at + 1])
        if self.texts and stops(self.decode, within, self.texts):
            return before_stop(self.decode, within, self.texts)
        return None if at is None else within
