"""Documents that are searched with queries: which text is which, what is relevant, and what is found. Uses only numpy.

A row is a single text, a query or a document, and its labels say what it is and what was judged about it:

    labels   float32 [n, 2 + 2 k]     side, number, then k judgements: number on the other side, grade
    side     0: query, 1: document
    number   counts queries, and documents, from 0
    pad      number -1, grade 0: no judgement

Judgements are stored at the queries or at the documents, whichever needs fewer columns. A choice of rows keeps its labels: queries are then
judged on the documents among these rows. Documents that nobody judged count as not relevant, as in BEIR (https://arxiv.org/abs/2104.08663).

    found for a query   the documents with the largest cosines, the nearest first; ties: the lowest row

A float32 counts texts exactly up to 2^24.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.form import Figure, zeros_beside
from foundation.labels.ranking import DEEPEST, METRICS, of_rankings
from foundation.labels.vectors import CHUNK, VectorLabels, of_length_one

Judgement = tuple[int, int, int]
"""Number of the query, number of the document, grade; 0: not relevant."""
QUERY, DOCUMENT = 0, 1
MOST_TEXTS = 2**24
TOP = 10
"""Documents of a result page: what answers are compared by."""


def labels_of(num_queries: int, num_documents: int, judgements: Sequence[Judgement]) -> Judged:
    """Returns the labels of all queries and then all documents, float32 `[num_queries + num_documents, 2 + 2 k]`."""
    assert max(num_queries, num_documents) <= MOST_TEXTS, (num_queries, num_documents)
    found = np.array(judgements, np.int64).reshape(-1, 3)
    counts = [int(np.bincount(found[:, side]).max(initial=0)) for side in (QUERY, DOCUMENT)]
    side = QUERY if counts[QUERY] <= counts[DOCUMENT] else DOCUMENT
    labels = np.zeros((num_queries + num_documents, 2 + 2 * max(1, counts[side])), np.float32)
    labels[num_queries:, 0] = DOCUMENT
    labels[:, 1] = np.concatenate([np.arange(num_queries), np.arange(num_documents)])
    labels[:, 2::2] = -1
    order = np.argsort(found[:, side], kind="stable")
    owners = found[order, side]
    places = np.arange(len(owners)) - np.searchsorted(owners, owners)  # the how-manieth judgement of its row
    rows = owners + (num_queries if side == DOCUMENT else 0)
    labels[rows, 2 + 2 * places] = found[order, 1 - side]
    labels[rows, 3 + 2 * places] = found[order, 2]
    return Judged(labels)


@dataclass(frozen=True)
class Known:
    """The queries, documents and judgements among some rows."""

    queries: Array
    """Rows of the queries that a judgement is known of, int64 `[q]`, by number."""
    documents: Array
    """Rows of the documents, int64 `[d]`, by number."""
    grades: tuple[dict[int, int], ...]
    """For each of these queries the grades of judged documents, by the place of a document in `documents`."""


def nearest(queries: Array, documents: Array, count: int) -> Array:
    """Returns the places of the `count` nearest documents of each query, int64 `[q, count]`, the nearest first; ties: the first document.

    Args:
        queries: Vectors, float `[q, D]`.
        documents: Vectors, float `[d, D]`.
        count: How many; all where there are fewer documents.
    """
    ours, theirs = (of_length_one(vectors).astype(np.float32) for vectors in (queries, documents))
    found = np.zeros((len(ours), min(count, len(theirs))), np.int64)
    for start in range(0, len(ours), CHUNK):
        cosines = ours[start : start + CHUNK] @ theirs.T
        found[start : start + CHUNK] = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
    return found


@dataclass(frozen=True, eq=False)
class Judged(VectorLabels):
    """Labels of queries and documents, float32 `[n, 2 + 2 k]`."""

    METRICS: ClassVar[Mapping[str, Figure]] = METRICS

    @cached_property
    def known(self) -> Known:
        """The judgements in the labels."""
        labels, sides = self.array, [self._by_number(side) for side in (QUERY, DOCUMENT)]
        places = [{int(number): place for place, number in enumerate(labels[rows, 1])} for rows in sides]
        grades: dict[int, dict[int, int]] = {}
        rows, columns = np.nonzero(labels[:, 2::2] >= 0)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            side, other = int(labels[row, 0]), int(labels[row, 2 + 2 * column])
            number = int(labels[row, 1])
            query, document = (number, other) if side == QUERY else (other, number)
            if query in places[QUERY] and document in places[DOCUMENT]:
                grades.setdefault(places[QUERY][query], {})[places[DOCUMENT][document]] = int(labels[row, 3 + 2 * column])
        judged = sorted(grades)
        return Known(sides[QUERY][judged], sides[DOCUMENT], tuple(grades[place] for place in judged))

    def _by_number(self, side: int) -> Array:
        rows = np.flatnonzero(self.array[:, 0] == side)
        return np.asarray(rows[np.argsort(self.array[rows, 1], kind="stable")])

    def nearest(self, vectors: Array, count: int = TOP) -> Array:
        """Returns the places of the documents that vectors `[n, D]` find for each judged query, int64 `[q, count]`."""
        return nearest(vectors[self.known.queries], vectors[self.known.documents], count)

    def values(self, answers: Array) -> tuple[Array, Array]:
        """The metrics of each judged query (`foundation.labels.ranking`)."""
        return zeros_beside(of_rankings(self.nearest(answers, DEEPEST).tolist(), self.known.grades))

    def count(self) -> int:
        """The number of judged queries."""
        return len(self.known.queries)

    def rows_of_values(self) -> Array:
        """The judged queries."""
        return self.known.queries[:, None]

    def overlap(self, reference: Array, answers: Array) -> float:
        """The share of the first 10 documents, as a mean over queries; 1 without queries."""
        before, after = self.nearest(reference), self.nearest(answers)
        if not before.size:
            return 1.0
        shared = [len(np.intersect1d(ours, theirs)) for ours, theirs in zip(before, after, strict=True)]
        return float(np.mean(shared)) / int(before.shape[1])

    def indexed(self, vectors: Array) -> Array:
        """The documents."""
        return np.asarray(vectors[self.array[:, 0] == DOCUMENT])

    def pseudo_labels(self, answers: Array) -> Judged:
        """The first 10 documents that these vectors `[n, D]` find for a query are relevant to it, whether it was judged or not."""
        queries, documents = (self._by_number(side) for side in (QUERY, DOCUMENT))
        top = nearest(answers[queries], answers[documents], TOP)
        relevant = [(query, int(document), 1) for query, places in enumerate(top) for document in places]
        changed = labels_of(len(queries), len(documents), relevant).array
        placed = np.zeros((len(self), changed.shape[1]), np.float32)
        placed[np.concatenate([queries, documents])] = changed
        return Judged(placed)
