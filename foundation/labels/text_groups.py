"""Texts that belong together without a score: pairs of an anchor and its positive, and groups with negatives. Uses only numpy.

A row of a task whose answer is a vector is a single text. Its labels say which others it belongs to, and which texts are the same:

    texts    [a_0, p_0, n_0, a_1, p_1, n_1, ...]          n rows; pairs have no negatives, triplets have one, other groups several
    labels   float32 [n, 4]     3, number of the group, part, number of the text
    part     0: anchor, 1: positive (says the same as the anchor, or answers it), 2, 3, ...: negatives (do not)
    text     equal texts of a split have the same number, so that a loss does not take one for the other's negative
    margin   a fifth column, float32 [n, 5], where a teacher's margins are given: how much higher it scores the positive than this negative;
             0 for other parts

Every group has as many rows as the largest one, so that batches are cut alike everywhere. Where a group has fewer negatives, its last text
is repeated, and the part says so: -k in the place of part k. A filler is a negative of no group.

A choice of rows keeps its labels, so that groups are found again in any order; what is left of a group without all its parts is no
prediction. A group is right where its anchor is nearer to the positive than to every negative, by cosine; equally near is wrong.

A float32 counts texts exactly up to 2^24.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from foundation.core import runs
from foundation.core.arrays import Array
from foundation.labels.form import rows_of_parts, whole_groups
from foundation.labels.vectors import VectorLabels, cosines

GROUP = 3
"""First entry of a label in a text group."""
ANCHOR, POSITIVE, NEGATIVE = 0, 1, 2
"""Parts of a group; NEGATIVE is the first of them."""
PAIR, TRIPLET = 2, 3
"""Texts of a group."""
WIDTH, WITH_MARGINS = 4, 5
"""Columns of labels."""
MOST_TEXTS = 2**24
NO_COSINE = -2.0
"""Score of a filler: less than any cosine."""


def filled(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns groups of texts that all have as many texts as the largest one: the last text of a smaller one is repeated."""
    size = max(map(len, groups), default=0)
    return [group + group[-1:] * (size - len(group)) for group in groups]


def labels_of(groups: Sequence[tuple[str, ...]], margins: Sequence[tuple[float, ...]] = ()) -> Groups:
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
    return Groups(np.stack(columns, axis=1).astype(np.float32))


@dataclass(frozen=True, eq=False)
class Groups(VectorLabels):
    """Labels of pairs, or of groups with negatives, without scores: float32 `[n, 4]`, or with margins `[n, 5]`."""

    @property
    def margins(self) -> Array | None:
        """The margins, float32 `[n]`; None without."""
        return self.array[:, 4] if self.array.shape[1] == WITH_MARGINS else None

    @property
    def _largest(self) -> int:
        return int(np.abs(self.array[:, 2]).max(initial=0)) + 1

    def parts(self, size: int) -> list[Array]:
        """Returns the rows of the anchors, of the positives and of each of the `size - 2` negatives of all groups that have each of them.

        Returns:
            int64 `[g]` each, in the order of the numbers of the groups; fillers take the place of their negatives.
        """
        labels = self.array
        found = [np.flatnonzero(np.abs(labels[:, 2]) == part) for part in range(size)]
        whole = found[ANCHOR]
        for rows in found[1:]:
            whole = whole[np.isin(labels[whole, 1], labels[rows, 1])]
        kept = [rows[np.isin(labels[rows, 1], labels[whole, 1])] for rows in found]
        return [rows[np.argsort(labels[rows, 1], kind="stable")] for rows in kept]

    @cached_property
    def judged(self) -> list[Array]:
        """The rows of whole groups with negatives, by their parts, int64 `[t]` each; three of them or more."""
        return self.parts(max(TRIPLET, self._largest))

    def values(self, answers: Array) -> tuple[Array, Array]:
        """The cosines of the anchor with every negative and with the positive of every whole group, float64 `[t, k + 1]`, and the column of
        the right one, int64 `[t]`.

        The largest one is the answer; the positive is last: of two equal ones, the first is the wrong one. Fillers have -2.
        """
        anchors, positives, *negatives = self.judged
        columns = [np.where(self.array[rows, 2] < 0, NO_COSINE, cosines(answers[anchors], answers[rows])) for rows in negatives]
        found = np.stack([*columns, cosines(answers[anchors], answers[positives])], axis=1)
        return found, np.full(len(found), found.shape[1] - 1)

    def choices(self, answers: Array) -> tuple[Array, Array] | None:
        """The nearest column, and the column of the positive."""
        found, true = self.values(answers)
        return found.argmax(axis=1), true

    def count(self) -> int:
        """The number of whole groups with negatives."""
        return len(self.judged[ANCHOR])

    def rows_of_values(self) -> Array:
        """The anchor and the positive of each whole group."""
        return rows_of_parts(self.judged)

    def pseudo_labels(self, answers: Array) -> Groups:
        """The positive of a group is the text that these vectors `[n, D]` find nearest."""
        _, positives, *negatives = self.judged
        nearest, changed = self.values(answers)[0].argmax(axis=1), self.array.copy()
        for column, rows in enumerate(negatives):
            wrong = nearest == column
            changed[positives[wrong], 2], changed[rows[wrong], 2] = NEGATIVE + column, POSITIVE
        return Groups(changed)

    def sample(self, count: int) -> list[int]:
        """Whole groups."""
        return whole_groups(self.judged, count)

    def runs(self) -> Array:
        """Whole groups where all rows are of such, one after the other; else single rows."""
        size = self._largest
        if size < PAIR or len(self) % size:
            return runs.equal(len(self), 1)
        whose, parts = self.array[:, 1].reshape(-1, size), np.sort(np.abs(self.array[:, 2]).reshape(-1, size), axis=1)
        whole = (whose == whose[:, :1]).all() and (parts == np.arange(size)).all()
        return runs.equal(len(self), size if whole else 1)
