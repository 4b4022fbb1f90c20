"""Flips of texts that are spoken: one for each sound that is read as another text."""

from __future__ import annotations

from typing import Any

import numpy as np

from compress.report.flips.classes import readable
from foundation.core.forms import transcripts
from foundation.data.splits import Data


class TranscriptFlips:
    """Describes the flip of the text of one sound.

    Args:
        data: The data of the run.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self._texts: dict[str, int] = {}

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the number of the text of each sound [n]."""
        return np.array([self._texts.setdefault(text, len(self._texts)) for text in transcripts.texts_of(logits)], np.int64)

    def line(self, place: tuple[int, ...], before: int, after: int, labels: np.ndarray) -> dict[str, Any]:
        """Returns both texts, the true one and the sound."""
        texts, names = list(self._texts), self.data.labels
        said = {name: transcripts.shown(texts[number], names) for name, number in (("before", before), ("after", after))}
        (true,) = transcripts.true_texts(labels[place[0] : place[0] + 1])
        return {**said, "label": true, "input": readable(self.data.evaluation.rows[place[0]])}
