"""Flips of transcripts: one for each sound that is transcribed differently."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compress.report.flips.classes import readable
from foundation.data.splits import Data
from foundation.labels.transcripts import Transcripts, shown, texts_of


class TranscriptFlips:
    """Describes the flip of the text of one sound.

    Args:
        data: The data of the run.
        labels: Its evaluation labels.
    """

    def __init__(self, data: Data, labels: Transcripts) -> None:
        self.data, self.labels = data, labels
        self._texts: dict[str, int] = {}

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the number of the text of each sound [n]."""
        return np.array([self._texts.setdefault(text, len(self._texts)) for text in texts_of(logits)], np.int64)

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns both texts, the true one and the sound."""
        texts, names = list(self._texts), self.data.labels
        said = {name: shown(texts[number], names) for name, number in (("before", before), ("after", after))}
        return {**said, "label": self.labels.texts[place[0]], "input": readable(self.data.evaluation.rows[place[0]])}
