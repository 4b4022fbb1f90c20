"""Flips of answers to questions: one for each question whose answer has another text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foundation.data.splits import Data
from foundation.labels.spans import Part, Spans
from foundation.standalone.windows import Window


class SpanFlips:
    """Describes the flip of the answer to one question. Its row is the first window of the context.

    Args:
        data: The data of the run.
        labels: Its evaluation labels.
    """

    def __init__(self, data: Data, labels: Spans) -> None:
        self.data, self.labels = data, labels
        self._texts: dict[str, int] = {}

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns for the first window of each question the number of the text of its answer [n]; 0 for other windows."""
        numbers, found = self.labels.numbers, np.zeros(len(logits), np.int64)
        for question in self.labels.questions(logits):
            row = self.data.evaluation.rows[question.row]
            assert isinstance(row, Window), type(row)
            start, end = (0, 0) if question.none else logits[question.row, Part.CHARACTERS].astype(int)
            first = int(np.argmax(numbers == numbers[question.row]))
            found[first] = self._texts.setdefault(row.context[start:end], len(self._texts))
        return found

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns both answers and the question; an empty one says that there is none."""
        row, texts = self.data.evaluation.rows[place[0]], list(self._texts)
        assert isinstance(row, Window), type(row)
        return {"before": texts[before], "after": texts[after], "label": None, "input": row.question}
