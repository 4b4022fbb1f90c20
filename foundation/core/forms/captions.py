"""Images that are found by their captions, and captions by their images: which belong together, and recall at k. Uses only numpy.

A row is an image or a caption, with the labels of `foundation.core.forms.zero_shot`:

    labels   float32 [n, 3]     side, number of the image, CAPTION

An image may have several captions. Recall at k as Karpathy and Fei-Fei count it (https://arxiv.org/abs/1412.2306, section 4.1), and CLIP
after them (https://arxiv.org/abs/2103.00020, table 13):

    text_to_image_recall@k    share of the captions whose image is among the k nearest images
    image_to_text_recall@k    share of the images of which any caption is among the k nearest captions
    mean_recall               mean of both at 1, 5 and 10

Equal cosines are in no order: what counts of them is the probability that a random order of them puts a right one among the first k
(McSherry and Najork, ECIR 2008). With a items above, and w wrong and r right ones at the cosine of the nearest right one:

    hit = 0 where a >= k, else 1 - prod_{j < k - a} (w - j) / (w + r - j)

So a model whose vectors are all the same gets what chance gets, and a caption that several images share finds each of them in turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundation.core.forms.relevance import nearest
from foundation.core.forms.vectors import CHUNK, of_length_one
from foundation.core.forms.zero_shot import IMAGE, TEXT, are_images_and_texts

Array = NDArray[Any]
CAPTION = -2
"""What stands in place of the number of a pair in labels of images that are judged by their captions."""
DEPTHS = (1, 5, 10)
FIGURES = ("mean_recall", *(f"{side}_recall@{depth}" for side in ("text_to_image", "image_to_text") for depth in DEPTHS))
"""Names of the metrics; but for the mean in the order of the columns of `figures`."""
EQUAL = 1e-6
"""Cosines that differ by less are equal: the same text gets vectors that differ in the last bits, by the batch it was in."""


def are_captions(labels: Array) -> bool:
    """Whether labels belong to images and their captions."""
    return are_images_and_texts(labels) and bool((labels[:, 2] == CAPTION).all())


def sides(labels: Array) -> tuple[Array, Array]:
    """Returns the rows of the images and of the captions, int64 `[a]` and `[b]`."""
    return np.flatnonzero(labels[:, 0] == IMAGE), np.flatnonzero(labels[:, 0] == TEXT)


def judged(labels: Array) -> Array:
    """Returns the rows of the images that have a caption among the rows, int64 `[m]`."""
    images, texts = sides(labels)
    return images[np.isin(labels[images, 1], labels[texts, 1])]


def figures(vectors: Array, labels: Array) -> Array:
    """Returns the results of each judged image, float64 `[m, 7]`.

    Three columns are how many of its captions find it at each depth, three whether it finds one of them, the last how many it has.

    Args:
        vectors: Vectors of the rows, float `[n, D]`.
        labels: Their labels, float32 `[n, 3]`.
    """
    images, texts = sides(labels)
    unit, number = of_length_one(vectors), labels[:, 1].astype(np.int64)
    units, asking = judged(labels), texts[np.isin(number[texts], number[images])]
    order = np.argsort(number[units])
    owner = order[np.searchsorted(number[units], number[asking], sorter=order)]
    found = np.zeros((len(units), 2 * len(DEPTHS) + 1))
    np.add.at(found[:, : len(DEPTHS)], owner, _hits(unit[asking], unit[images], number[asking], number[images]))
    found[:, len(DEPTHS) : -1] = _hits(unit[units], unit[texts], number[units], number[texts])
    np.add.at(found[:, -1], owner, 1)
    return found


def _hits(asking_QD: Array, asked_ND: Array, numbers_Q: Array, numbers_N: Array) -> Array:
    """Returns the probability that something right is among the nearest, for each query and depth, float64 `[Q, 3]`."""
    hits = np.zeros((len(asking_QD), len(DEPTHS)))
    for start in range(0, len(asking_QD), CHUNK):
        part = slice(start, start + CHUNK)
        cosines_QN = asking_QD[part] @ asked_ND.T
        right_QN = numbers_Q[part][:, None] == numbers_N[None, :]
        best_Q = np.where(right_QN, cosines_QN, -np.inf).max(axis=1, initial=-np.inf)[:, None]
        level_QN = np.abs(cosines_QN - best_Q) < EQUAL
        above, wrong, right = (which.sum(axis=1) for which in (cosines_QN >= best_Q + EQUAL, level_QN & ~right_QN, level_QN & right_QN))
        hits[part] = np.stack([_chance(above, wrong, right, depth) for depth in DEPTHS], axis=1)
    return hits


def _chance(above: Array, wrong: Array, right: Array, depth: int) -> Array:
    """Returns the probability of a hit at this depth, float64 `[Q]`; the arguments are a, w and r, int64 `[Q]`, r at least 1."""
    missed = np.ones(len(above))
    for place in range(depth):
        share = np.maximum(wrong - place, 0) / np.maximum(wrong + right - place, 1)
        missed *= np.where(place < depth - above, share, 1)
    return np.asarray(np.where(above < depth, 1 - missed, 0.0))


def column(name: str) -> Any:
    """Returns the metric of this name as a function of vectors `[n, D]` and labels; or of what `figures` returned, with labels `[m]`.

    Without a judged image it is 0.
    """
    place = FIGURES.index(name) - 1

    def value(answers: Array, labels: Array) -> float:
        rows = figures(answers, labels) if labels.ndim == 2 else answers
        if not len(rows):
            return 0.0
        sums = rows.sum(axis=0)
        recalls = np.concatenate([sums[: len(DEPTHS)] / sums[-1], sums[len(DEPTHS) : -1] / len(rows)])
        return float(recalls.mean() if place < 0 else recalls[place])

    return value


def found(vectors: Array, labels: Array, count: int) -> Array:
    """Returns the rows on the other side that are nearest to each row, int64 `[n, count]`, the nearest first; -1 where there are fewer."""
    rows = np.full((len(labels), count), -1)
    for asking, asked in (sides(labels), sides(labels)[::-1]):
        places = nearest(vectors[asking], vectors[asked], count)
        rows[asking, : places.shape[1]] = asked[places]
    return rows


def overlap(reference: Array, vectors: Array, labels: Array, count: int = DEPTHS[-1]) -> float:
    """Returns the share of the `count` nearest rows on the other side that two models have in common, as a mean over all rows."""
    before, after = found(reference, labels, count), found(vectors, labels, count)
    shared = [np.isin(ours[ours >= 0], theirs).mean() for ours, theirs in zip(before, after, strict=True) if (ours >= 0).any()]
    return float(np.mean(shared)) if shared else 1.0


def with_answers(labels: Array, vectors: Array) -> Array:
    """Returns labels of the same rows where every caption belongs to the image that these vectors `[n, D]` find for it."""
    changed = labels.copy()
    images, texts = sides(labels)
    if len(images):
        changed[texts, 1] = labels[found(vectors, labels, 1)[texts, 0], 1]
    return changed
