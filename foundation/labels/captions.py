"""Images that are found by their captions, and captions by their images: which belong together, and recall at k. Uses only numpy.

A row is an image or a caption, with the labels of `foundation.labels.zero_shot`:

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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.form import Figure, zeros_beside
from foundation.labels.relevance import nearest
from foundation.labels.vectors import CHUNK, of_length_one
from foundation.labels.zero_shot import ImagesAndTexts

CAPTION = -2
"""Placeholder for the pair number in labels of images that are judged by their captions."""
DEPTHS = (1, 5, 10)
FIGURES = ("mean_recall", *(f"{side}_recall@{depth}" for side in ("text_to_image", "image_to_text") for depth in DEPTHS))
"""Names of the metrics; but for the mean in the order of the columns of `Captions.values`."""
EQUAL = 1e-6
"""Cosines that differ by less are equal: the same text gets vectors that differ in the last bits, by the batch it was in."""


def labels_of(sides: Array, numbers: Array) -> Captions:
    """Returns the labels of rows, from their sides and the numbers of their images `[n]`."""
    return Captions(np.stack([sides, numbers, np.full(len(sides), CAPTION)], axis=1).astype(np.float32))


def _hits(asking_QD: Array, candidate_ND: Array, numbers_Q: Array, numbers_N: Array) -> Array:
    """Returns the probability that something right is among the nearest, for each query and depth, float64 `[Q, 3]`."""
    hits = np.zeros((len(asking_QD), len(DEPTHS)))
    for start in range(0, len(asking_QD), CHUNK):
        part = slice(start, start + CHUNK)
        cosines_QN = asking_QD[part] @ candidate_ND.T
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


def _mean_of(place: int) -> Figure:
    """Returns a metric of what `Captions.values` returns; `place` counts the recalls, -1: their mean. Without a judged image it is 0."""

    def value(figures: Array, _: Array) -> float:
        if not len(figures):
            return 0.0
        sums = figures.sum(axis=0)
        recalls = np.concatenate([sums[: len(DEPTHS)] / sums[-1], sums[len(DEPTHS) : -1] / len(figures)])
        return float(recalls.mean() if place < 0 else recalls[place])

    return value


@dataclass(frozen=True, eq=False)
class Captions(ImagesAndTexts):
    """Labels of images and their captions, float32 `[n, 3]`."""

    METRICS: ClassVar[Mapping[str, Figure]] = {name: _mean_of(place) for place, name in enumerate(FIGURES, -1)}
    ARE_SHARES: ClassVar[bool] = True

    def values(self, answers: Array) -> tuple[Array, Array]:
        """Retrieval figures of each judged image, float64 `[m, 7]`.

        Three columns are how many of its captions find it at each depth, three whether it finds one of them, the last how many it has.
        """
        images, texts = self.sides()
        unit, number, units = of_length_one(answers), self.array[:, 1].astype(np.int64), self.judged
        asking = texts[np.isin(number[texts], number[images])]
        order = np.argsort(number[units])
        owner = order[np.searchsorted(number[units], number[asking], sorter=order)]
        found = np.zeros((len(units), 2 * len(DEPTHS) + 1))
        np.add.at(found[:, : len(DEPTHS)], owner, _hits(unit[asking], unit[images], number[asking], number[images]))
        found[:, len(DEPTHS) : -1] = _hits(unit[units], unit[texts], number[units], number[texts])
        np.add.at(found[:, -1], owner, 1)
        return zeros_beside(found)

    def choices(self, answers: Array) -> tuple[Array, Array] | None:
        """None: captions are not classes."""
        return None

    def nearest(self, vectors: Array, count: int) -> Array:
        """Returns the rows on the other side that are nearest to each row, int64 `[n, count]`, nearest first; -1 where there are fewer."""
        rows = np.full((len(self), count), -1)
        for asking, asked in (self.sides(), self.sides()[::-1]):
            places = nearest(vectors[asking], vectors[asked], count)
            rows[asking, : places.shape[1]] = asked[places]
        return rows

    def overlap(self, reference: Array, answers: Array, count: int = DEPTHS[-1]) -> float:
        """The share of the `count` nearest rows on the other side, as a mean over all rows."""
        before, after = self.nearest(reference, count), self.nearest(answers, count)
        shared = [np.isin(ours[ours >= 0], theirs).mean() for ours, theirs in zip(before, after, strict=True) if (ours >= 0).any()]
        return float(np.mean(shared)) if shared else 1.0

    def pseudo_labels(self, answers: Array) -> Self:
        """Every caption belongs to the image that these vectors `[n, D]` find for it."""
        changed, (images, texts) = self.array.copy(), self.sides()
        if len(images):
            changed[texts, 1] = self.array[self.nearest(answers, 1)[texts, 0], 1]
        return replace(self, array=changed)
