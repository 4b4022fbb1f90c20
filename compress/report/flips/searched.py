"""Flips of documents that are searched: which one is found first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foundation.data.splits import Data
from foundation.labels.relevance import Judged, nearest
from foundation.standalone.preprocess import Row


class RetrievalFlips:
    """Describes the flip of one query: another document is now the first that is found for it.

    Documents that occur more than once count once: which of two equal vectors is nearer is chance.

    Args:
        data: The data of the run.
        labels: Its evaluation labels.
    """

    def __init__(self, data: Data, labels: Judged) -> None:
        self.data = data
        self.known = labels.known
        first: dict[Row, int] = {}
        for row in self.known.documents.tolist():
            first.setdefault(data.evaluation.rows[row], row)
        self.documents = np.array(list(first.values()))
        rows = self.known.documents
        self.grades = {
            query: {int(rows[place]): grade for place, grade in grades.items()}
            for query, grades in zip(self.known.queries.tolist(), self.known.grades, strict=True)
        }

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the row of the first document found for each query [n]; of other rows, their own."""
        answers = np.arange(len(logits))
        places = nearest(logits[self.known.queries], logits[self.documents], 1)[:, 0]
        answers[self.known.queries] = self.documents[places]
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Returns both documents with their grades, and the query."""
        rows, grades = self.data.evaluation.rows, self.grades[place[0]]
        found = {"grade_before": grades.get(before, 0), "grade_after": grades.get(after, 0), "label": None, "input": rows[place[0]]}
        return {"before": rows[before], "after": rows[after], **found}
