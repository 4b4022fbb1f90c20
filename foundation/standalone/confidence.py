"""How sure a model is of an answer, from its logits, and which model of a cascade answers a row.

This single file is copied next to the models of a server. It therefore needs only numpy (1 or 2). All scores are float64, and a larger
score is a surer answer. Of logits z of a row, divided by the temperature, with p = softmax(z):

    class   margin      z_(1) - z_(2), the two largest logits
            entropy     sum_c p_c log p_c, which is minus the entropy, in nats
            energy      log sum_c exp z_c, minus the free energy (Liu et al. 2020, https://arxiv.org/abs/2010.03759)
            calibrated  bias_c + w_1 margin + w_2 entropy + w_3 energy, c the largest logit: the logit of the probability that the original
                        model gives the same answer (Platt 1999), fitted on rows that choices are made on
    set     any number of labels holds, each where z > 0; with p = sigmoid(z)
            margin      min_c |z_c|
            entropy     minus the sum of the entropies of the labels
            energy      sum_c log(1 + exp z_c) (Wang et al. 2021, https://arxiv.org/abs/2109.07162)
    tags    logits [n, L, C] of words, zeros where there is no word: the least of the scores of the words
    value   one number z, which has no probabilities: calibrated, bias + w_1 z + w_2 z^2
    vector  numbers v, with u = v / |v|: calibrated, bias + w . u + w' log |v|; both are minus the logarithm of the distance from the
            original's answer that rows like this one had, a linear model that is fitted on rows that choices are made on

A model keeps a row if the score is at least its threshold. Logits that are not finite have no score, and such a row is never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

Array = np.ndarray[Any, Any]
NAMES = ("margin", "entropy", "energy")
"""The scores without parameters, in the order of `features`."""
CALIBRATED = "calibrated"
DISTANCES = ("value", "vector")
"""Forms of answers that are another answer where they are too far from the original's."""
KEEP_ALL = float(np.finfo(np.float32).min)
"""The threshold that every row with finite logits reaches."""
SURE = 1e30
"""Each score of a row without words: there is nothing to be wrong about."""


class Score(TypedDict):
    """A score and its parameters."""

    name: str
    """One of `NAMES`, or `CALIBRATED`."""
    form: str
    """Form of the answers: class, set, tags, value or vector."""
    temperature: float
    """What logits are divided by; 1 where nothing is calibrated."""
    weights: list[float]
    """Of a calibrated score: the weight of each feature; else empty."""
    bias: list[float]
    """Of a calibrated score: one for each class, or one for all; else empty."""


def confidence(logits: Array, score: Score) -> Array:
    """Returns the score of each row, float64 `[n]`; NaN where logits are not finite.

    Args:
        logits: What the model computed, float32 `[n, C]` with two classes or more, `[n, L, C]` for tags, `[n, 1]` for values or `[n, D]`
            for vectors.
        score: The score.
    """
    found = features(logits, score["form"], score["temperature"])
    if score["name"] != CALIBRATED:
        return np.asarray(found[:, NAMES.index(score["name"])])
    bias = np.array(score["bias"], np.float64)
    own = bias[np.asarray(logits).argmax(axis=1)] if len(bias) > 1 else bias
    return np.asarray(found @ np.array(score["weights"], np.float64) + own)


def features(logits: Array, form: str, temperature: float = 1.0) -> Array:
    """Returns what the scores of each row are made of, float64; NaN where logits are not finite.

    Of classes, sets and tags these are the scores of `NAMES`, `[n, 3]`; of a value z and z^2; of a vector its direction and the logarithm
    of its length, `[n, D + 1]`.

    Args:
        logits: As for `confidence`.
        form: class, set, tags, value or vector.
        temperature: What logits are divided by.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    with np.errstate(all="ignore"):  # of logits that are not finite
        found = FEATURES.get(form, _of_classes)(scaled)
        if form == "tags":
            words = np.asarray((scaled != 0).any(axis=-1))
            found = np.where(words[..., np.newaxis], found, SURE).min(axis=1)
    finite = np.asarray(np.isfinite(scaled.reshape(len(scaled), -1)).all(axis=1))
    return np.where(finite[:, np.newaxis], found, np.nan)


def kept(scores: Array, threshold: float | None) -> Array:
    """Returns which rows a model keeps, bool `[n]`.

    Args:
        scores: Result of `confidence`.
        threshold: The least score of a row that is kept; None: none is.
    """
    return np.zeros(len(scores), bool) if threshold is None else np.asarray(scores >= threshold)


def route(scores: Sequence[Array], thresholds: Sequence[float | None]) -> Array:
    """Returns the number of the model that answers each row, from 0, int64 `[n]`: the first that keeps it, else the last one.

    Args:
        scores: Scores of each model but the last, float64 `[n]` each.
        thresholds: Their thresholds.
    """
    answering = np.full(len(scores[0]), len(scores), np.int64)
    for number in reversed(range(len(scores))):
        answering[kept(scores[number], thresholds[number])] = number
    return answering


def _of_classes(logits: Array) -> Array:
    """Returns the three scores of logits `[..., C]`, `[..., 3]`."""
    two = np.partition(logits, -2, axis=-1)[..., -2:]
    largest = logits.max(axis=-1)
    shifted = logits - largest[..., np.newaxis]
    total = np.exp(shifted).sum(axis=-1)
    log_p = shifted - np.log(total)[..., np.newaxis]
    return np.stack([two[..., 1] - two[..., 0], (np.exp(log_p) * log_p).sum(axis=-1), largest + np.log(total)], axis=-1)


def _of_values(values: Array) -> Array:
    """Returns the features of values `[n, 1]`, `[n, 2]`."""
    return np.concatenate([values, values**2], axis=1)


def _of_vectors(vectors: Array) -> Array:
    """Returns the features of vectors `[n, D]`, `[n, D + 1]`; those of a vector of zeros are zeros."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    own = np.where(length > 0, length, 1.0)
    return np.concatenate([vectors / own, np.log(own)], axis=1)


def _of_sets(logits: Array) -> Array:
    """Returns the three scores of logits `[n, C]`, each label of which holds or does not, `[n, 3]`."""
    size = np.abs(logits)
    smaller = np.exp(-size)  # the odds of the less likely side
    entropy = np.log1p(smaller) + size * smaller / (1 + smaller)
    return np.stack([size.min(axis=1), -entropy.sum(axis=1), np.logaddexp(0, logits).sum(axis=1)], axis=1)


FEATURES = {"set": _of_sets, "value": _of_values, "vector": _of_vectors}
"""Features of the forms whose logits are not those of classes."""
