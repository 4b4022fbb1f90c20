"""Texts that belong together without a score: pairs of an anchor and its positive, and triplets with a negative. Uses only numpy.

A row of a task whose answer is a vector is a single text. Its labels say which others it belongs to, and which texts are the same:

    texts    [a_0, p_0, n_0, a_1, p_1, n_1, ...]          n rows; pairs have no negatives
    labels   float32 [n, 4]     3, number of the pair or triplet, part, number of the text
    part     0: anchor, 1: positive (says the same as the anchor, or answers it), 2: negative (does not)
    text     equal texts of a split have the same number, so that a loss does not take one for the other's negative

A choice of rows keeps its labels, so that groups are found again in any order; what is left of a group without all its parts is no
prediction. A triplet is right where its anchor is nearer to the positive than to the negative, by cosine; equally near is wrong.

A float32 counts texts exactly up to 2^24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.forms.vectors import cosines

Array = NDArray[Any]
GROUP = 3
"""What stands in front, where labels of queries and documents have 0 or 1 (`compress.core.forms.relevance`)."""
ANCHOR, POSITIVE, NEGATIVE = 0, 1, 2
PAIR, TRIPLET = 2, 3
"""Texts of a group."""
RIGHT = 1
"""Column of the positive in `similarities`."""
WIDTH = 4
MOST_TEXTS = 2**24


def are_groups(labels: Array) -> bool:
    """Whether labels are those of pairs or triplets without scores, float `[n, 4]`."""
    if labels.ndim != 2 or labels.shape[1] != WIDTH or not np.issubdtype(labels.dtype, np.floating):
        return False
    return bool((labels[:, 0] == GROUP).all())


def labels_of(groups: Sequence[tuple[str, ...]]) -> Array:
    """Returns the labels, float32 `[n, 4]`, of pairs or triplets of texts, the texts of each one after the other."""
    texts = [text for group in groups for text in group]
    assert len(texts) <= MOST_TEXTS, len(texts)
    numbers: dict[str, int] = {}
    same = [numbers.setdefault(text, len(numbers)) for text in texts]
    whose = [number for number, group in enumerate(groups) for _ in group]
    parts = [part for group in groups for part in range(len(group))]
    return np.stack([np.full(len(texts), GROUP), whose, parts, same], axis=1).astype(np.float32).reshape(-1, WIDTH)


def size_of(labels: Array) -> int:
    """Returns how many texts each group has, 2 or 3, where all rows are those of whole groups, one after the other; else 1."""
    size = int(labels[:, 2].max(initial=0)) + 1
    if size < POSITIVE + 1 or len(labels) % size:
        return 1
    whose, parts = labels[:, 1].reshape(-1, size), np.sort(labels[:, 2].reshape(-1, size), axis=1)
    return size if (whose == whose[:, :1]).all() and (parts == np.arange(size)).all() else 1


def parts_of(labels: Array, size: int) -> list[Array]:
    """Returns the rows of the anchors, of the positives and, for a `size` of 3, of the negatives of all groups that have each of them.

    Returns:
        int64 `[g]` each, in the order of the numbers of the groups.
    """
    found = [np.flatnonzero(labels[:, 2] == part) for part in range(size)]
    whole = found[ANCHOR]
    for rows in found[1:]:
        whole = whole[np.isin(labels[whole, 1], labels[rows, 1])]
    kept = [rows[np.isin(labels[rows, 1], labels[whole, 1])] for rows in found]
    return [rows[np.argsort(labels[rows, 1], kind="stable")] for rows in kept]


def num_groups(labels: Array) -> int:
    """Returns the number of groups that have an anchor and a positive."""
    return len(parts_of(labels, PAIR)[ANCHOR])


def num_triplets(labels: Array) -> int:
    """Returns the number of whole triplets."""
    return len(parts_of(labels, TRIPLET)[ANCHOR])


def similarities(vectors: Array, labels: Array) -> Array:
    """Returns the cosines of the anchor with the negative and with the positive of every whole triplet, float64 `[t, 2]`.

    The larger one is the answer; the positive stands last, so that of equal ones the first is the wrong one.

    Args:
        vectors: Vectors of the texts, float `[n, D]`.
        labels: Their labels, float32 `[n, 4]`.
    """
    anchors, positives, negatives = parts_of(labels, TRIPLET)
    return np.stack([cosines(vectors[anchors], vectors[others]) for others in (negatives, positives)], axis=1)


def values(vectors: Array, labels: Array) -> tuple[Array, Array]:
    """Returns the cosines of every whole triplet, float64 `[t, 2]`, and the column of the right one, int64 `[t]`."""
    found = similarities(vectors, labels)
    return found, np.full(len(found), RIGHT)


def with_answers(labels: Array, vectors: Array) -> Array:
    """Returns labels of the same rows where the positive of a triplet is the one that these vectors `[n, D]` find nearer."""
    _, positives, negatives = parts_of(labels, TRIPLET)
    wrong = similarities(vectors, labels).argmax(axis=1) != RIGHT
    changed = labels.copy()
    changed[positives[wrong], 2], changed[negatives[wrong], 2] = NEGATIVE, POSITIVE
    return changed
