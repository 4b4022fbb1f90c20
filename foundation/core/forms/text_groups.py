"""Texts that belong together without a score: pairs of an anchor and its positive, and groups with negatives. Uses only numpy.

A row of a task whose answer is a vector is a single text. Its labels say which others it belongs to, and which texts are the same:

    texts    [a_0, p_0, n_0, a_1, p_1, n_1, ...]          n rows; pairs have no negatives, triplets have one, other groups several
    labels   float32 [n, 4]     3, number of the group, part, number of the text
    part     0: anchor, 1: positive (says the same as the anchor, or answers it), 2, 3, ...: negatives (do not)
    text     equal texts of a split have the same number, so that a loss does not take one for the other's negative
    margin   a fifth column, float32 [n, 5], where a teacher's margins are given: how much higher it scores the positive than this negative;
             0 for other parts

Every group has as many rows as the largest one, so that batches are cut alike everywhere. Where a group has fewer negatives, its last text
is repeated, and the part says so: -k in the place of part k. Such a filler is no negative, neither of its group nor of another.

A choice of rows keeps its labels, so that groups are found again in any order; what is left of a group without all its parts is no
prediction. A group is right where its anchor is nearer to the positive than to every negative, by cosine; equally near is wrong.

A float32 counts texts exactly up to 2^24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundation.core.forms.vectors import cosines

Array = NDArray[Any]
GROUP = 3
"""What stands in front, where labels of queries and documents have 0 or 1 (`foundation.core.forms.relevance`)."""
ANCHOR, POSITIVE, NEGATIVE = 0, 1, 2
"""Parts of a group; NEGATIVE is the first of them."""
PAIR, TRIPLET = 2, 3
"""Texts of a group."""
WIDTH, WITH_MARGINS = 4, 5
"""Columns of labels."""
MOST_TEXTS = 2**24
NO_COSINE = -2.0
"""What a filler has instead of a cosine: less than any."""


def are_groups(labels: Array) -> bool:
    """Whether labels belong to pairs or to groups with negatives, without scores, float `[n, 4]` or `[n, 5]`."""
    if labels.ndim != 2 or labels.shape[1] not in (WIDTH, WITH_MARGINS) or not np.issubdtype(labels.dtype, np.floating):
        return False
    return bool((labels[:, 0] == GROUP).all())


def have_margins(labels: Array) -> bool:
    """Whether labels belong to groups with margins."""
    return are_groups(labels) and labels.shape[1] == WITH_MARGINS


def filled(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns groups of texts that all have as many texts as the largest one: the last text of a smaller one is repeated."""
    size = max(map(len, groups), default=0)
    return [group + group[-1:] * (size - len(group)) for group in groups]


def labels_of(groups: Sequence[tuple[str, ...]], margins: Sequence[tuple[float, ...]] = ()) -> Array:
    """Returns the labels, float32 `[n, 4]`, or `[n, 5]` with margins, of the texts of groups as `filled` returns them, one after the other.

    Args:
        groups: An anchor, a positive, and any number of negatives each, without fillers.
        margins: One for each negative of each group; empty without.
    """
    texts = [text for group in filled(groups) for text in group]
    assert len(texts) <= MOST_TEXTS, len(texts)
    numbers: dict[str, int] = {}
    same = [numbers.setdefault(text, len(numbers)) for text in texts]
    size = max(map(len, groups), default=0)
    whose = np.repeat(np.arange(len(groups)), size)
    parts = [part if part < len(group) else -part for group in groups for part in range(size)]
    columns: list[Any] = [np.full(len(texts), GROUP), whose, parts, same]
    if margins:
        columns.append(np.array([[0, 0, *own, *[0] * (size - PAIR - len(own))] for own in margins], np.float32).reshape(-1))
    return np.stack(columns, axis=1).astype(np.float32)


def size_of(labels: Array) -> int:
    """Returns how many rows each group has, 2 or more, where the rows form whole groups, one after the other; else 1."""
    size = _largest(labels)
    if size < PAIR or len(labels) % size:
        return 1
    whose, parts = labels[:, 1].reshape(-1, size), np.sort(np.abs(labels[:, 2]).reshape(-1, size), axis=1)
    return size if (whose == whose[:, :1]).all() and (parts == np.arange(size)).all() else 1


def _largest(labels: Array) -> int:
    return int(np.abs(labels[:, 2]).max(initial=0)) + 1


def parts_of(labels: Array, size: int) -> list[Array]:
    """Returns the rows of the anchors, of the positives and of each of the `size - 2` negatives of all groups that have each of them.

    Returns:
        int64 `[g]` each, in the order of the numbers of the groups; fillers stand in the place of their negatives.
    """
    found = [np.flatnonzero(np.abs(labels[:, 2]) == part) for part in range(size)]
    whole = found[ANCHOR]
    for rows in found[1:]:
        whole = whole[np.isin(labels[whole, 1], labels[rows, 1])]
    kept = [rows[np.isin(labels[rows, 1], labels[whole, 1])] for rows in found]
    return [rows[np.argsort(labels[rows, 1], kind="stable")] for rows in kept]


def num_groups(labels: Array) -> int:
    """Returns the number of groups that have an anchor and a positive."""
    return len(parts_of(labels, PAIR)[ANCHOR])


def judged(labels: Array) -> list[Array]:
    """Returns the rows of whole groups with negatives, by their parts, int64 `[t]` each; three of them or more."""
    return parts_of(labels, max(TRIPLET, _largest(labels)))


def num_judged(labels: Array) -> int:
    """Returns the number of whole groups with negatives."""
    return len(judged(labels)[ANCHOR])


def similarities(vectors: Array, labels: Array) -> Array:
    """Returns the cosines of the anchor with every negative and with the positive of every whole group, float64 `[t, k + 1]`.

    The largest one is the answer; the positive stands last, so that among equal ones the first is the wrong one. Fillers have -2.

    Args:
        vectors: Vectors of the texts, float `[n, D]`.
        labels: Their labels, float32 `[n, 4]`.
    """
    anchors, positives, *negatives = judged(labels)
    columns = [np.where(labels[rows, 2] < 0, NO_COSINE, cosines(vectors[anchors], vectors[rows])) for rows in negatives]
    return np.stack([*columns, cosines(vectors[anchors], vectors[positives])], axis=1)


def values(vectors: Array, labels: Array) -> tuple[Array, Array]:
    """Returns the cosines of every whole group, float64 `[t, k + 1]`, and the column of the right one, int64 `[t]`."""
    found = similarities(vectors, labels)
    return found, np.full(len(found), found.shape[1] - 1)


def with_answers(labels: Array, vectors: Array) -> Array:
    """Returns labels of the same rows where the positive of a group is the one that these vectors `[n, D]` find nearest."""
    _, positives, *negatives = judged(labels)
    answers, changed = similarities(vectors, labels).argmax(axis=1), labels.copy()
    for column, rows in enumerate(negatives):
        wrong = answers == column
        changed[positives[wrong], 2], changed[rows[wrong], 2] = NEGATIVE + column, POSITIVE
    return changed
