"""Candidates that a first search found for queries, to be put in a better order by a model that reads both texts. Uses only numpy.

A row is a pair, a query and one of its candidates, and its labels say what is known of them:

    labels   float32 [n, 13]    2, number of the query, grade of the candidate, then the 10 largest grades of any document for the query

The last ten are what a perfect order is worth, candidates or not. A choice of rows keeps its labels. Candidates of a query are in the order
of the first search: of equal scores the earlier one comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
CANDIDATE = 2
"""What stands in front, where labels of queries and documents have 0 or 1 (`foundation.core.forms.relevance`)."""
BEST = 10
"""Grades that the value of a perfect order is computed of."""
WIDTH = 3 + BEST


def are_candidates(labels: Array) -> bool:
    """Whether labels belong to candidates, float `[n, 13]`."""
    if labels.ndim != 2 or labels.shape[1] != WIDTH or not np.issubdtype(labels.dtype, np.floating):
        return False
    return bool((labels[:, 0] == CANDIDATE).all())


def labels_of(queries: Sequence[int], grades: Sequence[int], known: Sequence[Sequence[int]]) -> Array:
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
    return labels


@dataclass(frozen=True)
class Ordered:
    """The candidates of one query."""

    rows: Array
    """Their rows, the best first, int64 `[k]`."""
    grades: tuple[int, ...]
    """Their grades, in that order."""
    others: tuple[int, ...]
    """The ones among the 10 largest grades that no candidate has."""


def ordered(scores: Array, labels: Array) -> list[Ordered]:
    """Returns the candidates of each query, by its number, in the order of their scores.

    Args:
        scores: Scores, float `[n, 1]`.
        labels: Labels, float32 `[n, 13]`.
    """
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


def num_queries(labels: Array) -> int:
    """Returns the number of queries among labels `[n, 13]`."""
    return len(np.unique(labels[:, 1]))


def numbered(labels: Array, sizes: Array) -> Array:
    """Returns labels `[n, 13]` with queries numbered anew: the first of these sizes `[q]` are rows of the first one, and so on."""
    changed = labels.copy()
    changed[:, 1] = np.repeat(np.arange(len(sizes)), sizes)
    return changed


def with_answers(labels: Array, scores: Array) -> Array:
    """Returns labels where the candidates that these scores `[n, 1]` put first have the grades 10, 9, ..., 1, and the others 0."""
    changed = labels.copy()
    changed[:, 2:] = 0
    for query in ordered(scores, labels):
        grades = np.arange(BEST, 0, -1)[: len(query.rows)]
        changed[query.rows[:BEST], 2] = grades
        changed[query.rows, 3 : 3 + len(grades)] = grades
    return changed
