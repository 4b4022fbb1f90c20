"""A vector for every single text: vectors `[n, D]`, labels float32 `[n, 2]` of pairs (`foundation.core.forms.vectors`).

Where documents are searched labels are `[n, 2 + 2 k]` (`foundation.core.forms.relevance`), labels of images and texts `[n, 3]`
(`foundation.core.forms.zero_shot`, `foundation.core.forms.captions`).
"""

from __future__ import annotations

from typing import ClassVar

from foundation.answers.answer import Answer, Array
from foundation.core.forms import vectors
from foundation.core.forms.table import form_of
from foundation.core.tasks import VECTOR


class Vector(Answer):
    """The vector itself; what counts is its direction next to others."""

    FROM_HEAD: ClassVar[bool] = False
    PROBABILITIES: ClassVar[bool] = False
    LABELS: ClassVar[tuple[str, ...] | None] = VECTOR
    RESPONSE: ClassVar[str] = "vector"
    DIFFERS: ClassVar[str] = "vector"
    DISTANCE: ClassVar[str] = "squared_distance"
    DISAGREEMENT: ClassVar[str] = "1 - Pearson to the cosines of the float vectors of {n} selection rows"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Vectors that are far apart; relative distances, `[n]`."""
        apart = vectors.distances(reference, answers)
        return apart > vectors.FAR, apart

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """|v - v'|^2 / |v|^2, which is 2 - 2 cos(v, v') for vectors of length 1."""
        return vectors.distances(reference, logits) ** 2

    def disagreement(self, reference: Array, answers: Array) -> float:
        """1 - Pearson of the cosines of all pairs of rows."""
        return 1.0 - vectors.agreement(reference, answers)

    def as_labels(self, labels: Array, answers: Array) -> Array:
        """Turns answers into labels by their form: cosines of pairs become scores, documents that a query finds become relevant, and so
        on."""
        taught = form_of(labels).taught
        assert taught is not None, "every form of labels of vectors says so"
        return taught(labels, answers)
