"""Sets of labels: any number of labels holds for a row. Uses only numpy.

    labels      bool [n, C]        whether each label holds
    micro F1    2 tp / (2 tp + fp + fn) over all labels of all rows
    macro F1    the mean over the labels of the F1 of each; a label that neither occurs nor is predicted has 0, as in scikit-learn
    exact match share of rows whose whole set is right

A row that has no label, and for which none is found, is right. Where nothing occurs and nothing is found at all, micro F1 is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.answer import Answer, divergences
from foundation.labels.form import Labels


def micro_f1(predicted: Array, true: Array) -> float:
    """Returns micro F1 of two bool `[n, C]`."""
    hits, both = int(np.sum(predicted & true)), int(np.sum(predicted)) + int(np.sum(true))
    return 2 * hits / both if both else 1.0


def macro_f1(predicted: Array, true: Array) -> float:
    """Returns macro F1 of two bool `[n, C]`."""
    return float(np.mean(each_f1(predicted, true)))


def each_f1(predicted: Array, true: Array) -> Array:
    """Returns the F1 of each label, float64 `[C]`; 0 for a label that neither occurs nor is found."""
    hits, both = np.sum(predicted & true, axis=0), np.sum(predicted, axis=0) + np.sum(true, axis=0)
    return np.asarray(2 * hits / np.maximum(both, 1))


def exact_match(predicted: Array, true: Array) -> float:
    """Returns the share of rows whose sets are equal, of two bool `[n, C]`."""
    return float(np.mean((predicted == true).all(axis=1)))


def best_thresholds(logits: Array, labels: Array, fewest: int) -> Array:
    """Returns for each label the logit above which it holds with the best F1 on these rows, float64 `[C]`.

    Lipton, Elkan and Naryanaswamy 2014, https://arxiv.org/abs/1402.1892: F1 is best above a threshold of its own for each label. It is
    taken in the middle between two logits of the rows; of equal F1 the one nearest to 0.

    Args:
        logits: float32 `[n, C]`.
        labels: bool `[n, C]`.
        fewest: A label that fewer rows have, or that fewer rows lack, keeps 0: so few rows say little.
    """
    thresholds = np.zeros(logits.shape[1])
    for label in range(logits.shape[1]):
        true = labels[:, label]
        if min(int(true.sum()), int((~true).sum())) < fewest:
            continue
        order = np.argsort(-logits[:, label], kind="stable")
        scores, hits = logits[order, label].astype(np.float64), np.cumsum(true[order])
        count = np.arange(1, len(order) + 1)
        f1 = 2 * hits / (count + int(true.sum()))
        cut = np.append(scores[:-1] > scores[1:], True)  # equal logits fall on one side together
        middles = np.append((scores[:-1] + scores[1:]) / 2, scores[-1] - 1)
        best = np.flatnonzero(cut & (f1 >= f1[cut].max() - 1e-12))
        chosen = middles[best[np.argmin(np.abs(middles[best]))]]
        at_zero = int(np.sum(scores > 0))
        thresholds[label] = 0.0 if at_zero and f1[at_zero - 1] >= f1[cut].max() - 1e-12 else chosen
    return thresholds


@dataclass(frozen=True, eq=False)
class LabelSets(Labels):
    """Sets of labels, bool `[n, C]`."""

    DTYPE: ClassVar[type] = np.bool_

    def pseudo_labels(self, answers: Array) -> LabelSets:
        """The labels found."""
        return LabelSets(answers > 0)

    def class_counts(self, answers: Array) -> Array | None:
        """Counts of each label."""
        found = answers > 0
        return np.stack([(found & self.array).sum(0), found.sum(0), self.array.sum(0)], axis=1).astype(np.int64)

    def constants(self, answers: Array) -> Iterator[Array]:
        """The most frequent label, the two most frequent ones, and so on."""
        order = np.argsort(-self.array.mean(axis=0), kind="stable")
        for count in range(1, len(order) + 1):
            yield np.tile(np.where(np.isin(np.arange(len(order)), order[:count]), 1.0, -1.0), (len(self), 1))


class SetAnswer(Answer):
    """The set of labels whose logits are above 0."""

    FORM: ClassVar[type[Labels]] = LabelSets
    JUDGES_CLASSES: ClassVar[bool] = True
    POOLS_WINDOWS: ClassVar[bool] = True
    RESPONSE: ClassVar[str] = "labels"
    CONFIDENCE: ClassVar[str | None] = "set"
    DISAGREEMENT: ClassVar[str] = "1 - micro F1 against the labels that the float model finds on {n} selection rows"

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Rows with another set of labels; differences of the logits."""
        return self.other_rows(reference, answers), np.abs(answers.astype(np.float64) - reference)

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean over the labels of KL(p || p') of the probabilities that each holds, in nats."""
        both = (np.stack([np.zeros_like(values), values], axis=-1).reshape(-1, 2) for values in (reference, logits))
        return np.asarray(divergences(*both).reshape(reference.shape).mean(axis=1))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """1 - micro F1 of one set of labels against the other."""
        return 1.0 - micro_f1(answers > 0, reference > 0)

    def other_rows(self, reference: Array, answers: Array) -> Array:
        """Rows with another set of labels."""
        return np.asarray(((answers > 0) != (reference > 0)).any(axis=1))

    def has_class(self, answers: Array, true: Array, number: int) -> tuple[Array, Array]:
        """Rows for which the label is found, and rows for which it holds."""
        return answers[:, number] > 0, true[:, number]
