"""Flips of vectors: which other text is the nearest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foundation.data.splits import Data
from foundation.labels.vectors import VectorLabels, neighbours
from foundation.standalone.preprocess import Row


class NeighbourFlips:
    """Describes the flip of one text: another text of the evaluation split is now the nearest to it.

    Texts that occur more than once count once: which of two equal vectors is nearer is chance.

    Args:
        data: The data of the run.
        labels: Its evaluation labels.
    """

    def __init__(self, data: Data, labels: VectorLabels) -> None:
        self.data = data
        first: dict[Row, int] = {}
        for number, row in enumerate(data.evaluation.rows):
            first.setdefault(row, number)
        self.rows = np.array(list(first.values()))

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the row of the nearest other text of each text [n]; of a text that occurred before, its own row."""
        answers = np.arange(len(logits))
        if len(self.rows) > 1:
            answers[self.rows] = self.rows[neighbours(logits[self.rows])[:, 0]]
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns both neighbours and the text; there is no label of them."""
        rows = self.data.evaluation.rows
        return {"before": rows[before], "after": rows[after], "label": None, "input": rows[place[0]]}
