"""Flips of images that are found by words: the class whose texts are the nearest."""

from __future__ import annotations

from typing import Any

import numpy as np

from compress.report.flips.classes import readable
from foundation.core.forms import zero_shot
from foundation.data.splits import Data

NONE = -1


class NearestClassFlips:
    """Describes the flip of one image.

    Args:
        data: The data of the run.
    """

    def __init__(self, data: Data) -> None:
        self.data = data

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the class that is found for each image [n]; -1 for texts."""
        labels = self.data.evaluation.labels
        answers = np.full(len(labels), NONE)
        rows = zero_shot.judged(labels)
        answers[rows] = zero_shot.with_answers(labels, logits)[rows, 1]
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int, labels: np.ndarray) -> dict[str, Any]:
        """Returns both classes, the true one and the image."""
        names, label = self.data.labels, int(labels[place[0], 1])
        row = self.data.evaluation.rows[place[0]]
        return {"before": names[before], "after": names[after], "label": names[label], "input": readable(row)}
