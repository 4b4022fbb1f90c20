"""A vector for every single text: vectors `[n, D]`, labels float32 `[n, 2]` of pairs (`foundation.labels.vectors`).

Where documents are searched labels are `[n, 2 + 2 k]` (`foundation.labels.relevance`), labels of images and texts `[n, 3]`
(`foundation.labels.zero_shot`, `foundation.labels.captions`).
"""

from __future__ import annotations

from typing import ClassVar

from foundation.core.arrays import Array
from foundation.labels import vectors
from foundation.labels.answer import Answer
from foundation.labels.form import Labels
from foundation.labels.text_groups import WIDTH, Groups
from foundation.labels.vectors import Pairs


class VectorAnswer(Answer):
    """The vector itself; what counts is its direction next to others."""

    FORM: ClassVar[type[Labels]] = Pairs
    FROM_HEAD: ClassVar[bool] = False
    PROBABILITIES: ClassVar[bool] = False
    LABELS: ClassVar[tuple[str, ...] | None] = ("vector",)
    RESPONSE: ClassVar[str] = "vector"
    NOT_ON_GPUS: ClassVar[str | None] = "vectors"
    DIFFERS: ClassVar[str] = "vector"
    DISTANCE: ClassVar[str] = "squared_distance"
    DISAGREEMENT: ClassVar[str] = "1 - Pearson to the cosines of the float vectors of {n} selection rows"
    CONFIDENCE: ClassVar[str | None] = "vector"
    FAR: ClassVar[str | None] = "the length of the difference of the vectors over the length of the original's"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Vectors that are far apart; relative distances, `[n]`."""
        apart = vectors.distances(reference, answers)
        return apart > vectors.FAR, apart

    def apart(self, reference: Array, answers: Array) -> Array:
        """The relative distance of the vectors."""
        return vectors.distances(reference, answers)

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """|v - v'|^2 / |v|^2, which is 2 - 2 cos(v, v') for vectors of length 1."""
        return vectors.distances(reference, logits) ** 2

    def disagreement(self, reference: Array, answers: Array) -> float:
        """1 - Pearson of the cosines of all pairs of rows."""
        return 1.0 - vectors.agreement(reference, answers)

    def read(self, array: Array) -> Labels:
        """Texts that are compared form groups instead of pairs where a file has the columns of groups."""
        return Groups(array) if self.form is Pairs and array.shape[1] >= WIDTH else self.form(array)
