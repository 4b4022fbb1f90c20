"""Flips of images that are found by words: the class whose texts are the nearest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compress.report.flips.classes import readable
from foundation.data.splits import Data
from foundation.labels.zero_shot import ImagesAndTexts

NONE = -1


class NearestClassFlips:
    """Describes the flip of one image.

    Args:
        data: The data of the run.
        labels: Its evaluation labels.
    """

    def __init__(self, data: Data, labels: ImagesAndTexts) -> None:
        self.data, self.labels = data, labels

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the class that is found for each image [n]; -1 for texts."""
        answers = np.full(len(self.labels), NONE)
        answers[self.labels.judged] = self.labels.nearest_classes(logits)
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns both classes, the true one and the image."""
        names, label = self.data.labels, int(self.labels.array[place[0], 1])
        row = self.data.evaluation.rows[place[0]]
        return {"before": names[before], "after": names[after], "label": names[label], "input": readable(row)}
