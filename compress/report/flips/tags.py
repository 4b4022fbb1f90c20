"""Flips of tags: one for each word whose tag changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foundation.data.splits import Data
from foundation.labels.tags import NO_WORD, OUTSIDE, Tags, choices


@dataclass(frozen=True)
class TagFlips:
    """Describes the flip of the tag of one word."""

    data: Data
    labels: Tags

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the tag of each word, `NO_WORD` after the last one [n, L]."""
        return choices(logits)

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns the word, its tags and the true one, and the sentence; a word without a token is O."""
        (row, position), text = place, str(self.data.evaluation.rows[place[0]])
        names = dict(enumerate(self.data.labels)) | {NO_WORD: OUTSIDE}
        label = names[int(self.labels.array[row, len(self.data.labels) + position, 0])]
        said = {"before": names[before], "after": names[after], "label": label}
        return {"position": position + 1, "of": text.split(" ")[position], **said, "input": text}
