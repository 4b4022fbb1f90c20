"""Pairs of sentences with a score, for models that turn a single text into a vector.

    rows    (a, b), ...  n pairs          ->  texts   a, b, ...                         2 n rows
    scores  s            any numbers      ->  labels  (s - low) / (high - low) in [0, 1] on the train split, with the number of the pair

Texts are cut apart after rows were divided into splits: the two texts of a pair are always in the same one. The scale of the scores changes
no metric, as these are correlations, and gives the loss of training a cosine to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from compress.core import vectors
from compress.core.errors import InputError
from compress.data.splits import Data, Split
from compress.standalone.preprocess import Row


def as_texts(data: Data, where: str, log: Callable[[str], None]) -> Data:
    """Returns the data with a row for each text; see `compress.core.vectors` for its labels.

    Args:
        data: Splits of pairs with values.
        where: Name of the data in messages.
        log: Receives a message about the scale of the scores.

    Raises:
        InputError: All scores of the train split are equal, or a split has more pairs than can be numbered.
    """
    low, high = float(data.train.labels.min()), float(data.train.labels.max())
    if low == high:
        raise InputError(f"{where}: all train pairs have the score {low:g}; scores that differ are needed: set data.columns.label")
    log(f"data: each row is a pair of texts, and each text a row of its own; scores {low:g} to {high:g} are scaled to 0 to 1")
    train, selection, evaluation = (_texts(split, low, high, where) for split in (data.train, data.selection, data.evaluation))
    return replace(data, train=train, selection=selection, evaluation=evaluation)


def _texts(split: Split, low: float, high: float, where: str) -> Split:
    if len(split) > vectors.MOST_PAIRS:
        raise InputError(f"{where}: {len(split)} pairs in a split; at most {vectors.MOST_PAIRS} are allowed")
    texts: list[Row] = [text for pair in split.rows if isinstance(pair, tuple) for text in pair]
    assert len(texts) == 2 * len(split), "the columns of the task make pairs"
    scores = (split.labels.astype(np.float64) - low) / (high - low)
    return Split(texts, vectors.labels_of(scores))
