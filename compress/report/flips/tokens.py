"""Flips of tokens: which one is the likeliest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from foundation.data.splits import Data
from foundation.labels.next_token import Tokens, choices
from foundation.standalone.preprocess import TokenPair

TOKENS_SHOWN = 16


class TokenFlips:
    """Describes the flip of one token.

    Args:
        checkpoint: A checkpoint with the tokenizer that produced the text blocks.
        data: The data of the run.
        labels: Its evaluation labels.
    """

    def __init__(self, checkpoint: Path, data: Data, labels: Tokens) -> None:
        from tokenizers import Tokenizer

        self.tokenizer, self.data, self.labels = Tokenizer.from_file(str(checkpoint / "tokenizer.json")), data, labels

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the id of the most likely token [n, T]."""
        return choices(logits)

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns both predicted tokens, the token that followed, and the text just before it."""
        (row, position), label = place, int(self.labels.array[place])
        given = self.data.evaluation.rows[row]
        # what stands before the token: the source and the target up to it, or the block
        if isinstance(given, TokenPair):
            block, end = np.concatenate([given.source, given.target]), len(given.source) + position
        else:
            assert isinstance(given, np.ndarray), type(given)
            block, end = given, position + 1
        texts = {name: self._text([token]) for name, token in (("before", before), ("after", after), ("label", label))}
        return {"position": position + 1, **texts, "input": self._text(block[max(0, end - TOKENS_SHOWN) : end].tolist())}

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text
