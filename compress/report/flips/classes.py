"""Flips of one label of several, and of numbers, which have none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foundation.data.splits import Data
from foundation.labels.form import Labels
from foundation.standalone.preprocess import Row
from foundation.standalone.sound import is_sound


@dataclass(frozen=True)
class RowFlips:
    """Describes the flip of one row."""

    data: Data
    labels: Labels

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the class of each row [n]; 0 where answers are not classes, so that nothing flips."""
        found = self.labels.choices(logits)
        return np.zeros(len(logits), np.int64) if found is None else found[0]

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns both predictions, the label and the input row."""
        names, label = self.data.labels, int(self.labels.array[place])
        text = readable(self.data.evaluation.rows[place[0]])
        return {"before": names[before], "after": names[after], "label": names[label], "input": text}


def readable(row: Row) -> Row | str:
    """Returns a row as JSON shows it."""
    return f"{'sound' if is_sound(row) else 'image'} of {len(row)} bytes" if isinstance(row, bytes) else row
