"""Images and texts in one space of vectors: which row is which, what class it is of, and which class an image is nearest to.

Uses only numpy.

A row is an image or a text, and its labels say:

    labels   float32 [n, 3]     side, class, number of the pair
    side     0: image, 1: text
    pair     of rows that are trained together, an image and a text about it; -1: no pair

Where images have captions of their own, the number of the image takes the place of the class (`foundation.labels.captions`).

The texts of a class are its name in one or several templates ("a photo of a {}"). Zero-shot classification (CLIP, Radford et al. 2021,
https://arxiv.org/abs/2103.00020, section 3.1):

    c_k     = u / |u|,  u = mean over the texts t of class k of v_t / |v_t|            section 3.1.4: the ensemble of prompts
    answer  = argmax_k  v . c_k / |v|                                                   v: the vector of an image

The scale of the logits, and the bias of SigLIP, change no argmax. Classes without a text among the rows cannot be found, and their images
are not predictions. A float32 counts classes and pairs exactly up to 2^24.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from foundation.core import runs
from foundation.core.arrays import Array
from foundation.core.spread import spread
from foundation.labels.form import MOST_CLASSES, counts_of_ids
from foundation.labels.vectors import VectorLabels, follow_each_other, of_length_one
from foundation.standalone.preprocess import Row

IMAGE, TEXT = 0, 1
SIDES: Mapping[str, int] = {"image": IMAGE, "text": TEXT}
"""The side of the rows that each tower of a model reads."""
NO_PAIR = -1


def labels_of(sides: Array, classes: Array, pairs: Array | None = None) -> ImagesAndTexts:
    """Returns the labels of rows, float32 `[n, 3]`, from their sides, classes and, if any, pairs `[n]`."""
    numbers = np.full(len(sides), NO_PAIR) if pairs is None else pairs
    return ImagesAndTexts(np.stack([sides, classes, numbers], axis=1).astype(np.float32))


def read_by(modality: str, rows: Sequence[Row]) -> list[int]:
    """Returns the numbers of the rows that a model reads: the rows of its modality where there are images and texts, else all."""
    if modality == "image":
        return [number for number, row in enumerate(rows) if isinstance(row, bytes)]
    return [number for number, row in enumerate(rows) if not isinstance(row, bytes)] if modality == "text" else list(range(len(rows)))


@dataclass(frozen=True, eq=False)
class ImagesAndTexts(VectorLabels):
    """Labels of images and texts, float32 `[n, 3]`."""

    ONE_CLASS: ClassVar[bool] = True

    def sides(self) -> tuple[Array, Array]:
        """Returns the rows of the images and of the texts, int64 `[a]` and `[b]`."""
        return self.of_tower("image"), self.of_tower("text")

    def of_tower(self, tower: str | None) -> Array:
        """The images or the texts."""
        return super().of_tower(None) if tower is None else np.flatnonzero(self.array[:, 0] == SIDES[tower])

    def class_vectors(self, vectors: Array) -> tuple[Array, Array]:
        """Returns the classes that have a text, int64 `[k]` ascending, and their vectors of length 1, float64 `[k, D]`."""
        texts = self.of_tower("text")
        classes, place = np.unique(self.array[texts, 1].astype(np.int64), return_inverse=True)
        sums = np.zeros((len(classes), vectors.shape[1]))
        np.add.at(sums, place, of_length_one(vectors[texts]))
        return classes, of_length_one(sums)

    @cached_property
    def judged(self) -> Array:
        """The rows of the images whose class (in captions: whose number) a text has, int64 `[m]`."""
        images, texts = self.sides()
        return images[np.isin(self.array[images, 1], self.array[texts, 1])]

    def values(self, answers: Array) -> tuple[Array, Array]:
        """The cosine of every judged image with every class that has a text, float64 `[m, k]`, and the column of its own, int64 `[m]`."""
        classes, of_classes = self.class_vectors(answers)
        found = of_length_one(answers[self.judged]) @ of_classes.T
        return found, np.searchsorted(classes, self.array[self.judged, 1].astype(np.int64))

    def choices(self, answers: Array) -> tuple[Array, Array] | None:
        """The column of the nearest class, and the column of the image's own."""
        found, true = self.values(answers)
        return found.argmax(axis=1), true

    def nearest_classes(self, answers: Array) -> Array:
        """Returns the class that is found for each judged image, int64 `[m]`; 0 where no class has a text."""
        classes, _ = self.class_vectors(answers)
        return classes[self.values(answers)[0].argmax(axis=1)] if len(classes) else np.zeros(len(self.judged), np.int64)

    def class_counts(self, answers: Array) -> Array | None:
        """Counts of each class over the judged images."""
        return counts_of_ids(self.nearest_classes(answers), self.array[self.judged, 1].astype(np.int64))

    def count(self) -> int:
        """The number of judged images."""
        return len(self.judged)

    def rows_of_values(self) -> Array:
        """The judged images."""
        return self.judged[:, None]

    def pseudo_labels(self, answers: Array) -> Self:
        """Every judged image is of the class that these vectors `[n, D]` find for it."""
        changed = self.array.copy()
        changed[self.judged, 1] = self.nearest_classes(answers)
        return replace(self, array=changed)

    def constants(self, answers: Array) -> Iterator[Array]:
        """Zeros; then vectors where every image is a text of one class, of captions one caption: of the five most frequent classes."""
        yield np.zeros_like(answers)
        images, texts = self.sides()
        classes, counts = np.unique(self.array[images, 1], return_counts=True)
        for known in classes[np.argsort(-counts, kind="stable")[:MOST_CLASSES]]:
            own = texts[self.array[texts, 1] == known]
            if len(own):
                made = answers.copy()
                made[images] = answers[own].mean(axis=0)
                yield made

    def evenly(self, count: int) -> list[int]:
        """About so many rows, ascending: every text, up to half of them, and evenly spaced images."""
        images, texts = (rows.tolist() for rows in self.sides())
        chosen = spread(texts, max(1, count // 2))
        return sorted([*chosen, *spread(images, max(1, count - len(chosen)))])

    def first(self, count: int) -> list[int]:
        """As `evenly`: texts are the last rows."""
        return self.evenly(count)

    def runs(self) -> Array:
        """Two rows each where an image and a text that are trained together follow each other."""
        return runs.equal(len(self), follow_each_other(self.array[:, 2]))
