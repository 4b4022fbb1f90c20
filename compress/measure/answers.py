"""Answers: what is kept of the logits of a model, how batches are put together, checked and stored. Numpy alone, as in the engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core import next_token
from compress.core.errors import InputError
from compress.standalone.preprocess import Preprocessor

Array = NDArray[Any]


def gathered(found: Iterable[tuple[Sequence[int], Array]], count: int) -> Array:
    """Returns the answers to `count` rows, in row order, from batches of indices and answers `[b, ...]`.

    Raises:
        InputError: There are none, or an answer is NaN or infinite; names the row.
    """
    whole: Array | None = None
    for indices, answers in found:
        whole = np.zeros((count, *answers.shape[1:]), np.float32) if whole is None else whole
        whole[indices] = answers
    if whole is None:
        raise InputError("data: no row to predict; at least one row is needed")
    bad = not_finite(whole)
    if len(bad):
        raise InputError(f"model: the answer to {len(bad)} of {count} rows is NaN or infinite, first to row {bad[0]}; check its weights")
    return whole


def kept(preprocessor: Preprocessor, rows: Sequence[Any], logits: Array) -> Array:
    """Returns what is kept of the logits of a batch, float32: all of them `[b, C]`, or for generation the answers `[b, T, 2]`."""
    if preprocessor.generates:
        return next_token.answers_of(rows, logits, preprocessor.max_length - 1)
    return logits


def not_finite(answers: Array) -> Array:
    """Returns the rows of `[n, ...]` that hold NaN or infinity, int64."""
    return np.flatnonzero(~np.isfinite(answers.reshape(len(answers), -1)).all(axis=1))


def save_predictions(path: Path, logits: Array, labels: Array) -> None:
    """Writes `logits` (float32 `[n, C]` or `[n, T, 2]`) and `labels` (int64 or float32 `[n]`, or int32 `[n, T]`) to a safetensors file."""
    from safetensors.numpy import save_file

    kind = np.float32 if np.issubdtype(labels.dtype, np.floating) else np.int32 if labels.ndim == 2 else np.int64
    save_file({"logits": np.ascontiguousarray(logits, np.float32), "labels": np.ascontiguousarray(labels, kind)}, path)


def load_predictions(path: Path) -> tuple[Array, Array]:
    """Returns (logits float32 `[n, ...]`, labels `[n, ...]`) of a file written by `save_predictions`."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return tensors["logits"], tensors["labels"]
