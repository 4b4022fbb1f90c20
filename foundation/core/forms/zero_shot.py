"""Images and texts in one space of vectors: which row is which, what class it is of, and which class an image is nearest to.

Uses only numpy.

A row is an image or a text, and its labels say:

    labels   float32 [n, 3]     side, class, number of the pair
    side     0: image, 1: text
    pair     of rows that are trained together, an image and a text about it; -1: no pair

Where images have captions of their own, the number of the image takes the place of the class (`foundation.core.forms.captions`).

The texts of a class are its name in one or several templates ("a photo of a {}"). Zero-shot classification (CLIP, Radford et al. 2021,
https://arxiv.org/abs/2103.00020, section 3.1):

    c_k     = u / |u|,  u = mean over the texts t of class k of v_t / |v_t|            section 3.1.4: the ensemble of prompts
    answer  = argmax_k  v . c_k / |v|                                                   v: the vector of an image

The scale of the logits, and the bias of SigLIP, change no argmax. Classes without a text among the rows cannot be found, and their images
are no predictions. A float32 counts classes and pairs exactly up to 2^24.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundation.core import spread as evenly
from foundation.core.forms.vectors import follow_each_other, of_length_one

Array = NDArray[Any]
IMAGE, TEXT = 0, 1
SIDES: Mapping[str, int] = {"image": IMAGE, "text": TEXT}
"""The side of the rows that each tower of a model reads."""
NO_PAIR = -1


def are_images_and_texts(labels: Array) -> bool:
    """Whether labels belong to images and texts, float `[n, 3]`."""
    return labels.ndim == 2 and labels.shape[1] == 3 and bool(np.issubdtype(labels.dtype, np.floating))


def labels_of(sides: Array, classes: Array, pairs: Array | None = None) -> Array:
    """Returns the labels of rows, float32 `[n, 3]`, from their sides, classes and, if any, pairs `[n]`."""
    numbers = np.full(len(sides), NO_PAIR) if pairs is None else pairs
    return np.stack([sides, classes, numbers], axis=1).astype(np.float32)


def together(labels: Array) -> int:
    """Returns 2 where an image and a text that are trained together follow each other, else 1."""
    return follow_each_other(labels[:, 2])


def class_vectors(vectors: Array, labels: Array) -> tuple[Array, Array]:
    """Returns the classes that have a text, int64 `[k]` ascending, and their vectors of length 1, float64 `[k, D]`.

    Args:
        vectors: Vectors of the rows, float `[n, D]`.
        labels: Their labels, float32 `[n, 3]`.
    """
    texts = np.flatnonzero(labels[:, 0] == TEXT)
    classes, place = np.unique(labels[texts, 1].astype(np.int64), return_inverse=True)
    sums = np.zeros((len(classes), vectors.shape[1]))
    np.add.at(sums, place, of_length_one(vectors[texts]))
    return classes, of_length_one(sums)


def judged(labels: Array) -> Array:
    """Returns the rows of the images whose class has a text, int64 `[m]`."""
    return np.flatnonzero((labels[:, 0] == IMAGE) & np.isin(labels[:, 1], labels[labels[:, 0] == TEXT, 1]))


def similarities(vectors: Array, labels: Array) -> tuple[Array, Array]:
    """Returns the cosine of every judged image with every class that has a text, float64 `[m, k]`, and the column of its own class, int64
    `[m]`."""
    classes, of_classes = class_vectors(vectors, labels)
    rows = judged(labels)
    return of_length_one(vectors[rows]) @ of_classes.T, np.searchsorted(classes, labels[rows, 1].astype(np.int64))


def with_answers(labels: Array, vectors: Array) -> Array:
    """Returns labels of the same rows where every judged image is of the class that these vectors `[n, D]` find for it."""
    classes, _ = class_vectors(vectors, labels)
    changed = labels.copy()
    changed[judged(labels), 1] = classes[similarities(vectors, labels)[0].argmax(axis=1)] if len(classes) else 0
    return changed


def spread(labels: Array, count: int) -> list[int]:
    """Returns about `count` row numbers, ascending: every text, up to half of them, and evenly spaced images.

    Args:
        labels: Labels of the rows, float32 `[n, 3]`.
        count: How many.
    """
    texts, images = (np.flatnonzero(labels[:, 0] == side).tolist() for side in (TEXT, IMAGE))
    chosen = evenly.spread(texts, max(1, count // 2))
    return sorted([*chosen, *evenly.spread(images, max(1, count - len(chosen)))])


def read_by(modality: str, rows: Sequence[Any]) -> list[int]:
    """Returns the numbers of the rows that a model reads: among images and texts the rows of its modality, else all."""
    if modality == "image":
        return [number for number, row in enumerate(rows) if isinstance(row, bytes)]
    return [number for number, row in enumerate(rows) if not isinstance(row, bytes)] if modality == "text" else list(range(len(rows)))
