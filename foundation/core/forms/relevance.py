"""Documents that are searched with queries: which text is which, what is relevant, and what is found. Uses only numpy.

A row is a single text, a query or a document, and its labels say what it is and what was judged about it:

    labels   float32 [n, 2 + 2 k]     side, number, then k judgements: number on the other side, grade
    side     0: query, 1: document
    number   counts queries, and documents, from 0
    pad      number -1, grade 0: no judgement

Judgements stand at the queries or at the documents, where fewer columns hold them. A choice of rows keeps its labels: queries are then
judged on the documents among these rows. Documents that nobody judged count as not relevant, as in BEIR (https://arxiv.org/abs/2104.08663).

    found for a query   the documents with the largest cosines, the nearest first; ties: the lowest row

A float32 counts texts exactly up to 2^24.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundation.core.forms.vectors import CHUNK, of_length_one

Array = NDArray[Any]
Judgement = tuple[int, int, int]
"""Number of the query, number of the document, grade; 0: not relevant."""
QUERY, DOCUMENT = 0, 1
MOST_TEXTS = 2**24
TOP = 10
"""Documents of a result page: what answers are compared by."""


def are_judged(labels: Array) -> bool:
    """Whether labels belong to queries and documents, float `[n, 2 + 2 k]` with k >= 1; labels of pairs have two columns."""
    if labels.ndim != 2 or labels.shape[1] < 4 or not np.issubdtype(labels.dtype, np.floating):
        return False
    return bool((labels[:, 0] <= DOCUMENT).all())


def labels_of(num_queries: int, num_documents: int, judgements: Sequence[Judgement]) -> Array:
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
    return labels


@dataclass(frozen=True)
class Judged:
    """The queries, documents and judgements among some rows."""

    queries: Array
    """Rows of the queries that a judgement is known of, int64 `[q]`, by number."""
    documents: Array
    """Rows of the documents, int64 `[d]`, by number."""
    grades: tuple[dict[int, int], ...]
    """For each of these queries the grades of judged documents, by the place of a document in `documents`."""


def judged(labels: Array) -> Judged:
    """Returns the labels of some rows, float32 `[n, 2 + 2 k]`."""
    sides = [_by_number(labels, side) for side in (QUERY, DOCUMENT)]
    places = [{int(number): place for place, number in enumerate(labels[rows, 1])} for rows in sides]
    grades: dict[int, dict[int, int]] = {}
    rows, columns = np.nonzero(labels[:, 2::2] >= 0)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        side, other = int(labels[row, 0]), int(labels[row, 2 + 2 * column])
        number = int(labels[row, 1])
        query, document = (number, other) if side == QUERY else (other, number)
        if query in places[QUERY] and document in places[DOCUMENT]:
            grades.setdefault(places[QUERY][query], {})[places[DOCUMENT][document]] = int(labels[row, 3 + 2 * column])
    known = sorted(grades)
    return Judged(sides[QUERY][known], sides[DOCUMENT], tuple(grades[place] for place in known))


def _by_number(labels: Array, side: int) -> Array:
    rows = np.flatnonzero(labels[:, 0] == side)
    return np.asarray(rows[np.argsort(labels[rows, 1], kind="stable")])


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


def found(vectors: Array, labels: Array, count: int = TOP) -> tuple[Judged, Array]:
    """Returns the judged queries, and the places of the documents that vectors `[n, D]` find for each of them, int64 `[q, count]`."""
    known = judged(labels)
    return known, nearest(vectors[known.queries], vectors[known.documents], count)


def overlap(reference: Array, vectors: Array, labels: Array, count: int = TOP) -> float:
    """Returns the share of the first `count` documents that two models have in common, as a mean over queries; 1 without queries."""
    (_, before), (_, after) = (found(one, labels, count) for one in (reference, vectors))
    if not before.size:
        return 1.0
    shared = [len(np.intersect1d(ours, theirs)) for ours, theirs in zip(before, after, strict=True)]
    return float(np.mean(shared)) / int(before.shape[1])


def with_answers(labels: Array, vectors: Array) -> Array:
    """Returns labels of the same rows where the first 10 documents that these vectors `[n, D]` find for a query are relevant to it.

    Every query counts as judged, even without a known judgement.
    """
    queries, documents = (_by_number(labels, side) for side in (QUERY, DOCUMENT))
    top = nearest(vectors[queries], vectors[documents], TOP)
    answers = [(query, int(document), 1) for query, places in enumerate(top) for document in places]
    changed = labels_of(len(queries), len(documents), answers)
    placed = np.zeros((len(labels), changed.shape[1]), np.float32)
    placed[np.concatenate([queries, documents])] = changed
    return placed
