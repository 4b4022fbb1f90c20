"""Flips of rankings: another candidate comes first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foundation.data.splits import Data
from foundation.labels.candidates import Candidates


class FirstFlips:
    """Describes the flip of one query: another candidate now comes first. Its row is the row of the first candidate.

    Args:
        data: The data of the run.
        labels: Its evaluation labels.
    """

    def __init__(self, data: Data, labels: Candidates) -> None:
        self.data, self.labels = data, labels

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns for the first row of each query the row of the candidate with the highest score [n]; of other rows, their own."""
        answers = np.arange(len(logits))
        for query in self.labels.ordered(logits):
            answers[query.rows.min()] = query.rows[0]
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns both candidates with their grades, and the query."""
        (query, first), (_, second) = self._pair(before), self._pair(after)
        grades = {"grade_before": int(self.labels.array[before, 2]), "grade_after": int(self.labels.array[after, 2])}
        return {"before": first, "after": second, **grades, "label": None, "input": query}

    def _pair(self, row: int) -> tuple[str, str]:
        """Returns a query and a candidate."""
        pair = self.data.evaluation.rows[row]
        assert isinstance(pair, tuple), type(pair)
        return pair
