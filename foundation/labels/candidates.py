"""Candidates that a first search found for queries, to be put in a better order by a model that reads both texts. Uses only numpy.

A row is a pair, a query and one of its candidates, and its labels say what is known of them:

    labels   float32 [n, 13]    2, number of the query, grade of the candidate, then the 10 largest grades of any document for the query

The last ten give the value of a perfect order, whether they are candidates or not. A selection of rows keeps its labels. Candidates of a
query are in the order of the first search: of equal scores the earlier one comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foundation.core import runs
from foundation.core.arrays import Array
from foundation.labels.form import Labels, first_rows, zeros_beside
from foundation.labels.ranking import of_rankings

CANDIDATE = 2
"""First entry of a candidate's label, where labels of queries and documents have 0 or 1 (`foundation.labels.relevance`)."""
BEST = 10
"""Number of grades that define the value of a perfect order."""
WIDTH = 3 + BEST


def labels_of(queries: Sequence[int], grades: Sequence[int], known: Sequence[Sequence[int]]) -> Candidates:
    """Returns the labels of pairs, float32 `[n, 13]`.

    Args:
        queries: Number of the query of each pair.
        grades: Grade of the candidate of each pair; 0: not relevant, or not judged.
        known: For each query, by number, the grades of all documents that were judged.
    """
    labels = np.zeros((len(queries), WIDTH), np.float32)
    labels[:, 0], labels[:, 1], labels[:, 2] = CANDIDATE, queries, grades
    best = [sorted(some, reverse=True)[:BEST] for some in known]
    padded = np.array([[*some, *[0] * (BEST - len(some))] for some in best], np.float32).reshape(-1, BEST)
    labels[:, 3:] = padded[np.asarray(queries, np.int64)]
    return Candidates(labels)


@dataclass(frozen=True)
class Ordered:
    """The candidates of one query."""

    rows: Array
    """Their rows, the best first, int64 `[k]`."""
    grades: tuple[int, ...]
    """Their grades, in that order."""
    others: tuple[int, ...]
    """Grades among the 10 largest ones that no candidate has."""


@dataclass(frozen=True, eq=False)
class Candidates(Labels):
    """Labels of candidates, float32 `[n, 13]`."""

    RUN: ClassVar[str] = "candidates of a query"

    def ordered(self, scores: Array) -> list[Ordered]:
        """Returns the candidates of each query, by its number, in the order of their scores, float `[n, 1]`."""
        labels = self.array
        order = np.lexsort((np.arange(len(labels)), -scores[:, 0], labels[:, 1]))
        starts = np.flatnonzero(np.diff(labels[order, 1], prepend=np.nan))
        found = []
        for rows in np.split(order, starts[1:]) if len(order) else []:
            grades, best = [int(grade) for grade in labels[rows, 2]], [int(grade) for grade in labels[rows[0], 3:] if grade > 0]
            for grade in grades:
                if grade in best:
                    best.remove(grade)
            found.append(Ordered(rows, tuple(grades), tuple(best)))
        return found

    def values(self, answers: Array) -> tuple[Array, Array]:
        """The metrics of each query (`foundation.labels.ranking`)."""
        queries = self.ordered(answers)
        grades = [dict(enumerate((*query.grades, *query.others))) for query in queries]
        return zeros_beside(of_rankings([range(len(query.rows)) for query in queries], grades))

    def count(self) -> int:
        """The number of queries."""
        return len(np.unique(self.array[:, 1]))

    def rows_of_values(self) -> Array:
        """The first candidate of each query."""
        return first_rows(self.array[:, 1])

    def grouped_by(self, content: Any) -> Any:
        """The query."""
        return content[0]

    def pseudo_labels(self, answers: Array) -> Candidates:
        """The candidates that these scores `[n, 1]` put first have the grades 10, 9, ..., 1, and the others 0."""
        changed = self.array.copy()
        changed[:, 2:] = 0
        for query in self.ordered(answers):
            grades = np.arange(BEST, 0, -1)[: len(query.rows)]
            changed[query.rows[:BEST], 2] = grades
            changed[query.rows, 3 : 3 + len(grades)] = grades
        return Candidates(changed)

    def unit(self, reference: Array) -> float:
        """The standard deviation of the reference: only the order counts."""
        return float(np.std(reference.astype(np.float64))) or 1.0

    def runs(self) -> Array:
        """Each query with its candidates."""
        return runs.sizes_of(self.array[:, 1])

    def renumber(self, sizes: Array) -> Candidates:
        """Renumbers the queries: the first of these sizes `[q]` are the rows of the first query, and so on."""
        changed = self.array.copy()
        changed[:, 1] = np.repeat(np.arange(len(sizes)), sizes)
        return Candidates(changed)
