"""Flips of multi-label rows: one for each label that only one of two backends predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from compress.report.flips.classes import readable
from foundation.data.splits import Data
from foundation.labels.label_sets import LabelSets

SAID = {0: "no", 1: "yes"}


@dataclass(frozen=True)
class SetFlips:
    """Describes the flip of one label of one row."""

    data: Data
    labels: LabelSets

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns whether each label is predicted, 0 or 1 [n, C]."""
        return np.asarray((logits > 0).astype(np.int64))

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns the label, whether it was found, and whether it holds, and the input row."""
        row, label = place
        said = {"before": SAID[before], "after": SAID[after], "label": SAID[int(self.labels.array[place])]}
        return {"of": self.data.labels[label], **said, "input": readable(self.data.evaluation.rows[row])}
