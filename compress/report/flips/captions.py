"""Flips of images and captions: which one of the other side is found first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foundation.data.splits import Data
from foundation.labels.captions import Captions
from foundation.standalone.preprocess import Row


class CaptionFlips:
    """Describes the flip of one image or caption: another one of the other side is now the nearest.

    Captions that several images share count once: which of two equal vectors is nearer is chance.

    Args:
        data: The data of the run.
        labels: Its evaluation labels.
    """

    def __init__(self, data: Data, labels: Captions) -> None:
        self.data, self.labels = data, labels
        self.images, texts = labels.sides()
        first: dict[Row, int] = {}
        for row in texts.tolist():
            first.setdefault(data.evaluation.rows[row], row)
        self.rows = np.sort(np.array([*self.images.tolist(), *first.values()], np.int64))

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the row that each image or caption finds first [n]; of a caption that occurred before, its own row."""
        answers = np.arange(len(logits))
        answers[self.rows] = self.rows[self.labels[self.rows].nearest(logits[self.rows], 1)[:, 0]]
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns the results before and now, which of them are right, and the image or caption of the query."""
        numbers = self.labels.array[:, 1]
        right = {f"right_{name}": bool(numbers[row] == numbers[place[0]]) for name, row in (("before", before), ("after", after))}
        return {"before": self._named(before), "after": self._named(after), **right, "label": None, "input": self._named(place[0])}

    def _named(self, row: int) -> str:
        """Returns a caption, or an image by its row and its first caption."""
        text = self.data.evaluation.rows[row]
        if isinstance(text, str):
            return text
        numbers = self.labels.array[:, 1]
        own = next(other for other in self.labels.sides()[1].tolist() if numbers[other] == numbers[row])
        return f"image of row {row}: {self.data.evaluation.rows[own]}"
