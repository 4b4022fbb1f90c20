"""What a served model returns for its logits: the names, types and shapes of its outputs, one class for each form.

This single file makes the outputs inside the Triton server, where it is copied next to the model and `preprocess.py`, and says outside what
they have to be. It therefore needs only numpy (1 or 2).

    label    LABEL  STRING [1]    name of the class                                     SCORE, LOGITS as below
             SCORE  FP32   [1]    softmax score of the class; the value for regression
             LOGITS FP32   [C]
    labels   LABEL  STRING [C]    names of all labels, the most likely first            any number of them may hold
             SCORE  FP32   [C]    their sigmoid scores; a label holds if its score is above 0.5
             LOGITS FP32   [C]    in the order of the model
    vector   VECTOR FP32   [D]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LABEL, SCORE, LOGITS, VECTOR = "LABEL", "SCORE", "LOGITS", "VECTOR"
STRING, FP32 = "STRING", "FP32"


@dataclass(frozen=True)
class Output:
    """One output of a served model."""

    name: str
    kind: str
    """STRING or FP32."""
    dims: tuple[int, ...]
    """Its shape without the batch."""


class Response(ABC):
    """One form of response."""

    RAW = LOGITS
    """The output that holds what the engine computed."""

    @abstractmethod
    def outputs(self, width: int) -> tuple[Output, ...]:
        """Returns the outputs of a model with so many logits, or numbers of a vector."""

    @abstractmethod
    def of(self, logits: Array, labels: tuple[str, ...]) -> dict[str, Array]:
        """Returns the outputs by name, `[n, ...]`; strings are UTF-8 bytes in an array of objects.

        Args:
            logits: What the engine computed, float32 `[n, C]`.
            labels: Names of the logits.
        """


class Label(Response):
    """The most likely label; ties take the lowest class id."""

    def outputs(self, width: int) -> tuple[Output, ...]:
        """One label."""
        return Output(LABEL, STRING, (1,)), Output(SCORE, FP32, (1,)), Output(LOGITS, FP32, (width,))

    def of(self, logits: Array, labels: tuple[str, ...]) -> dict[str, Array]:
        """The label with the largest logit and its softmax score; of a single logit its name and value."""
        _check(logits, labels)
        values = np.asarray(logits, dtype=np.float32)
        if len(labels) == 1:
            return {LABEL: _strings([[labels[0]]] * len(values)), SCORE: values, LOGITS: logits}
        best = values.argmax(axis=1)
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        scores = powers[np.arange(len(powers)), best] / powers.sum(axis=1)
        return {LABEL: _strings([[labels[index]] for index in best]), SCORE: scores[:, None], LOGITS: logits}


class Labels(Response):
    """All labels with their scores."""

    def outputs(self, width: int) -> tuple[Output, ...]:
        """As many labels as there are."""
        return Output(LABEL, STRING, (width,)), Output(SCORE, FP32, (width,)), Output(LOGITS, FP32, (width,))

    def of(self, logits: Array, labels: tuple[str, ...]) -> dict[str, Array]:
        """The labels by falling logits, ties by their ids, with 1 / (1 + exp(-logit))."""
        _check(logits, labels)
        values = np.asarray(logits, dtype=np.float32)
        order = np.argsort(-values, axis=1, kind="stable")
        ordered = np.take_along_axis(values, order, axis=1)
        scores = np.exp(-np.logaddexp(np.float32(0), -ordered)).astype(np.float32)
        return {LABEL: _strings([[labels[index] for index in row] for row in order]), SCORE: scores, LOGITS: logits}


class Vector(Response):
    """The vector as it is."""

    RAW = VECTOR

    def outputs(self, width: int) -> tuple[Output, ...]:
        """One vector."""
        return (Output(VECTOR, FP32, (width,)),)

    def of(self, logits: Array, labels: tuple[str, ...]) -> dict[str, Array]:
        """The vectors."""
        return {VECTOR: logits}


RESPONSES: Mapping[str, Response] = {"label": Label(), "labels": Labels(), "vector": Vector()}
"""The forms, by the name in preprocess.json."""


def _check(logits: Array, labels: tuple[str, ...]) -> None:
    if logits.ndim != 2 or logits.shape[1] != len(labels):
        raise ValueError(f"logits of shape {logits.shape}; [n, {len(labels)}] expected")


def _strings(rows: list[list[str]]) -> Array:
    width = len(rows[0]) if rows else 1
    return np.array([[text.encode("utf-8") for text in row] for row in rows], dtype=np.object_).reshape(len(rows), width)
