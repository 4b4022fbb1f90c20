"""Flips of images and captions: which one of the other side is found first."""

from __future__ import annotations

from typing import Any

import numpy as np

from foundation.core.forms import captions
from foundation.data.splits import Data


class CaptionFlips:
    """Describes the flip of one image or caption: another one of the other side is now the nearest.

    Captions that several images share count once: which of two equal vectors is nearer is chance.

    Args:
        data: The data of the run.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self.images, texts = captions.sides(data.evaluation.labels)
        first: dict[Any, int] = {}
        for row in texts.tolist():
            first.setdefault(data.evaluation.rows[row], row)
        self.rows = np.sort(np.array([*self.images.tolist(), *first.values()], np.int64))

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the row that each image or caption finds first [n]; of a caption that occurred before, its own row."""
        answers = np.arange(len(logits))
        answers[self.rows] = self.rows[captions.found(logits[self.rows], self.data.evaluation.labels[self.rows], 1)[:, 0]]
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int, labels: np.ndarray) -> dict[str, Any]:
        """Returns the results before and now, which of them are right, and the image or caption of the query."""
        numbers = labels[:, 1]
        right = {f"right_{name}": bool(numbers[row] == numbers[place[0]]) for name, row in (("before", before), ("after", after))}
        return {"before": self._named(before), "after": self._named(after), **right, "label": None, "input": self._named(place[0])}

    def _named(self, row: int) -> str:
        """Returns a caption, or an image by its row and its first caption."""
        text = self.data.evaluation.rows[row]
        if isinstance(text, str):
            return text
        labels = self.data.evaluation.labels
        own = next(other for other in captions.sides(labels)[1].tolist() if labels[other, 1] == labels[row, 1])
        return f"image of row {row}: {self.data.evaluation.rows[own]}"
