"""Vectors of texts: which texts form a pair, how similar two vectors are, and how far two models are apart. Uses only numpy.

A row of a task whose answer is a vector is a single text. Data come in pairs of texts with a score; the two texts are consecutive rows, and
their labels hold the number of the pair:

    texts   [a_0, b_0, a_1, b_1, ...]                             n rows
    labels  [[0, s_0], [0, s_0], [1, s_1], [1, s_1], ...]         float32 [n, 2]: number of the pair, its score

A selection of rows keeps its labels, so pairs can be matched in any order; a text whose partner is missing is not a prediction.

    similarity of a pair    cos(a, b) = a . b / (|a| |b|)
    distance of two models  |v - w| / |v|, v from the reference; of vectors of length 1 it is sqrt(2 - 2 cos(v, w))
    neighbour of a text     the other text whose vector has the largest cosine with its own

A float32 counts pairs exactly up to 2^24.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from foundation.core import runs
from foundation.core.arrays import Array
from foundation.labels.form import Labels, rows_of_parts, whole_groups

FAR = 0.1
"""Relative distance from which on two vectors count as different predictions: a cosine of 0.995."""
MOST_PAIRS = 2**24
CHUNK = 1024
"""Rows whose cosines with all others are in memory at once."""


def labels_of(scores: Array) -> Pairs:
    """Returns the labels, float32 `[2 p, 2]`, of pairs with these scores `[p]`, both texts of a pair one after the other."""
    assert len(scores) <= MOST_PAIRS, len(scores)
    pairs = np.stack([np.arange(len(scores), dtype=np.float32), scores.astype(np.float32)], axis=1)
    return Pairs(np.repeat(pairs, 2, axis=0))


def follow_each_other(numbers: Array) -> int:
    """Returns 2 where every second row has the number of the one before it, none of them negative, else 1; numbers are `[n]`."""
    if len(numbers) % 2:
        return 1
    return 2 if (numbers[::2] == numbers[1::2]).all() and (numbers >= 0).all() else 1


def of_length_one(vectors: Array) -> Array:
    """Returns the vectors divided by their lengths, float64 `[n, D]`; a vector of zeros stays one, so that its cosines are 0."""
    exact = vectors.astype(np.float64)
    return np.asarray(exact / np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), 1e-30))


def distances(reference: Array, vectors: Array) -> Array:
    """Returns the relative distance of each vector from its reference, float64 `[n]`; both are `[n, D]`."""
    before = reference.astype(np.float64)
    return np.asarray(np.linalg.norm(vectors - before, axis=1) / np.maximum(np.linalg.norm(before, axis=1), 1e-30))


def cosines(reference: Array, vectors: Array) -> Array:
    """Returns the cosine of each vector with its reference, float64 `[n]`; both are `[n, D]`."""
    return np.asarray(np.einsum("nd,nd->n", of_length_one(reference), of_length_one(vectors)))


def neighbours(vectors: Array, count: int = 1) -> Array:
    """Returns for each row the rows of the `count` nearest other vectors, int64 `[n, count]`, the nearest first; ties: the lowest row.

    Args:
        vectors: Vectors, float `[n, D]`.
        count: How many, at most `n - 1`.
    """
    unit = of_length_one(vectors).astype(np.float32)
    found = np.zeros((len(unit), count), np.int64)
    for start in range(0, len(unit), CHUNK):
        cosines = unit[start : start + CHUNK] @ unit.T
        cosines[np.arange(len(cosines)), np.arange(start, start + len(cosines))] = -np.inf  # no text is its own neighbour
        found[start : start + CHUNK] = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
    return found


def overlap(reference: Array, vectors: Array, count: int = 10) -> float:
    """Returns the share of the `count` nearest texts that two models have in common, as a mean over texts; 1 for a single text."""
    count = min(count, len(reference) - 1)
    if count < 1:
        return 1.0
    before, after = neighbours(reference, count), neighbours(vectors, count)
    return float(np.mean([len(np.intersect1d(ours, theirs)) for ours, theirs in zip(before, after, strict=True)])) / count


def agreement(reference: Array, vectors: Array) -> float:
    """Returns the Pearson correlation between the cosines of all pairs of rows in two models; 1 for fewer than three rows."""
    if len(reference) < 3:
        return 1.0
    above = np.triu_indices(len(reference), 1)
    one, other = ((unit @ unit.T)[above] for unit in map(of_length_one, (reference, vectors)))
    one, other = one - one.mean(), other - other.mean()
    scale = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / scale if scale else 0.0


@dataclass(frozen=True, eq=False)
class VectorLabels(Labels):
    """Labels of rows whose answers are vectors."""

    COMPARED: ClassVar[bool] = True

    def overlap(self, reference: Array, answers: Array) -> float:
        """Returns the share of a row's 10 nearest texts that two models have in common, from vectors `[n, D]` of both."""
        return overlap(reference, answers)

    def indexed(self, vectors: Array) -> Array:
        """Returns the vectors that an index stores, `[m, D]`."""
        return vectors


@dataclass(frozen=True, eq=False)
class Pairs(VectorLabels):
    """Labels of texts of pairs with a score, float32 `[n, 2]`."""

    @cached_property
    def partners(self) -> tuple[Array, Array]:
        """The rows of the first and of the second text of every complete pair, int64 `[p]` each, in the order of their numbers."""
        order = np.argsort(self.array[:, 0], kind="stable")
        numbers = self.array[order, 0]
        first = np.flatnonzero(numbers[:-1] == numbers[1:])
        return order[first], order[first + 1]

    def values(self, answers: Array) -> tuple[Array, Array]:
        """The cosine, float64 `[p, 1]`, and the score, float32 `[p]`, of every complete pair."""
        first, second = self.partners
        return cosines(answers[first], answers[second])[:, None], self.array[first, 1]

    def count(self) -> int:
        """The number of complete pairs."""
        return len(self.partners[0])

    def rows_of_values(self) -> Array:
        """Both texts of each pair."""
        return rows_of_parts(self.partners)

    def pseudo_labels(self, answers: Array) -> Pairs:
        """The cosines of these vectors `[n, D]` are the scores."""
        changed, found = self.array.copy(), self.values(answers)[0][:, 0]
        for rows in self.partners:
            changed[rows, 1] = found
        return Pairs(changed)

    def sample(self, count: int) -> list[int]:
        """Whole pairs."""
        return whole_groups(self.partners, count)

    def runs(self) -> Array:
        """Two rows each where the texts of each pair follow each other."""
        return runs.equal(len(self), follow_each_other(self.array[:, 0]))
