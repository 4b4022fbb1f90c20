"""Predictions as arrays: which part of the logits they hold, and how batches are merged, checked and stored. Uses only numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foundation.artifacts.artifact import read_json, write_json
from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.core.files import check_plain
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.standalone.adapted import adapter_of
from foundation.standalone.preprocess import Preprocessor, Row

ROW_ADAPTERS = "row_adapters.json"
"""File of the names of the adapters of evaluation rows."""


def gathered(batches: Iterable[tuple[Sequence[int], Array]], count: int) -> Array:
    """Merges batches of (row indices, predictions `[b, ...]`) into one array in row order, float32 `[count, ...]`.

    Raises:
        InputError: There are no rows, or a prediction is NaN or infinite; the message names the row.
    """
    whole: Array | None = None
    for indices, answers in batches:
        whole = np.zeros((count, *answers.shape[1:]), np.float32) if whole is None else whole
        whole[indices] = answers
    if whole is None:
        raise InputError("data", "no row to predict", remedy="give at least one row")
    bad = not_finite(whole)
    if len(bad):
        raise InputError(
            "model", f"the logits of {len(bad)} of {count} rows are NaN or infinite, the first in row {bad[0]}", remedy="check its weights"
        )
    return whole


def compressed(preprocessor: Preprocessor, rows: Sequence[Any], logits: Array) -> Array:
    """Returns what predictions hold of the logits of a batch (`foundation.labels.answer.Answer.compressed`), float32 `[b, ...]`."""
    return TASKS[preprocessor.task].answer.compressed(preprocessor, rows, logits)


def not_finite(answers: Array) -> Array:
    """Returns the indices, int64, of the rows of `[n, ...]` that contain NaN or infinity."""
    return np.flatnonzero(~np.isfinite(answers.reshape(len(answers), -1)).all(axis=1))


def save_predictions(path: Path, logits: Array, labels: Labels, groups: Array | None = None) -> None:
    """Writes `logits` (float32 `[n, C]`, `[n, T, 2]` or `[n, L, C]`) and `labels` (as their form has them) to a safetensors file, and
    `groups` (int64 `[m]`, `foundation.data.groups`)."""
    from safetensors.numpy import save_file

    stored: Array = np.ascontiguousarray(labels.array.astype(labels.DTYPE))
    tensors = {"logits": np.ascontiguousarray(logits, np.float32), "labels": stored}
    save_file(tensors if groups is None else {**tensors, "groups": np.ascontiguousarray(groups, np.int64)}, path)


def load_predictions(path: Path, task: Task) -> tuple[Array, Labels]:
    """Returns the logits, float32 `[n, ...]`, and the labels of a file written by `save_predictions`.

    Args:
        path: The file.
        task: The task that was predicted.

    Raises:
        InputError: It is not a plain file.
    """
    tensors = _tensors(path)
    return tensors["logits"], TASKS[task].answer.read(tensors["labels"])


def load_logits(path: Path) -> Array:
    """Returns the logits of a file written by `save_predictions`, float32 `[n, ...]`; raises what `load_predictions` raises."""
    return _tensors(path)["logits"]


def _tensors(path: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    check_plain(path, str(path))
    return dict(load_file(path))


def load_groups(path: Path) -> Array | None:
    """Returns the groups of a file written by `save_predictions`, int64 `[m]`; None where it has none.

    Raises:
        InputError: It is not a plain file.
    """
    from safetensors import safe_open

    check_plain(path, str(path))
    with safe_open(path, framework="numpy") as file:
        return file.get_tensor("groups") if "groups" in file.keys() else None  # noqa: SIM118  # it is not a mapping


def write_row_adapters(folder: Path, rows: Sequence[Row]) -> None:
    """Writes the name of the adapter of each row next to predictions; writes nothing where rows name none."""
    names = [adapter_of(row) for row in rows]
    if any(names):
        write_json(folder / ROW_ADAPTERS, names)


def read_row_adapters(folder: Path) -> list[str]:
    """Returns the name of the adapter of each row; empty where rows name none.

    Raises:
        DamagedArtifact: The file is damaged.
    """
    return [str(name) for name in read_json(folder / ROW_ADAPTERS)] if (folder / ROW_ADAPTERS).is_file() else []
