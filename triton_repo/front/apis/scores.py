"""Scores of labels, of the logits of a model, as pipelines give them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foundation.core.json_value import Json
from triton_repo.front.apis.catalog import Served

Function = Literal["sigmoid", "softmax", "none"]
"""What makes scores of logits."""


def function_of(model: Served) -> Function:
    """Returns what makes scores of the logits of a model: softmax of labels of which one holds, sigmoid of labels of which any number may
    hold, nothing of a value."""
    if len(model.known.labels) == 1:
        return "none"
    return "sigmoid" if model.known.response == "labels" else "softmax"


def scores(logits: NDArray[np.float32], function: Function) -> NDArray[np.float64]:
    """Returns scores, float64 [n, C], of logits, float32 [n, C]."""
    values = logits.astype(np.float64)
    if function == "sigmoid":
        return np.exp(-np.logaddexp(0.0, -values))
    if function == "softmax":
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))
    return values


def ranked(logits: NDArray[np.float32], model: Served, function: Function, most: int | None = None) -> list[list[Json]]:
    """Returns of each row its labels with their scores, the highest score first; of equal ones the first label.

    Args:
        logits: float32 [n, C].
        model: The model, which has C labels.
        function: What makes scores of the logits.
        most: Most labels of a row; None: all.
    """
    rows: list[list[Json]] = []
    for row in scores(logits, function):
        order = np.argsort(-row, kind="stable")[:most]
        rows.append([{"label": model.known.labels[index], "score": float(row[index])} for index in order])
    return rows
