"""Stored predictions of a cascade: what the original and the tiers answered to selection and certificate rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from export.cascade.tested import Answers
from foundation.artifacts.cascade import KEYS, LABELS, ORIGINAL, TIER
from foundation.core.arrays import Array
from foundation.core.files import check_plain
from foundation.labels.tasks import TASKS, Task


def save(path: Path, answers: Answers, keys: list[bytes]) -> None:
    """Writes the answers to some rows, and the content keys of the rows."""
    from safetensors.numpy import save_file

    tensors = {ORIGINAL: np.ascontiguousarray(answers.original, np.float32), KEYS: keys_array(keys)}
    tensors |= {f"{TIER}{number}": np.ascontiguousarray(logits, np.float32) for number, logits in enumerate(answers.tiers, 1)}
    if answers.labels is not None:
        tensors[LABELS] = np.ascontiguousarray(answers.labels.array.astype(answers.labels.DTYPE))
    save_file(tensors, path)


def load(path: Path, task: Task, limit: float | None = None) -> tuple[Answers, Array]:
    """Returns the answers of a file, and the content keys of its rows, uint8 `[n, 16]`.

    Args:
        path: The file.
        task: The task.
        limit: Distance above which a number or a vector is another answer (`Certificate.distance`).

    Raises:
        InputError: It is not a plain file.
    """
    from safetensors.numpy import load_file

    check_plain(path, str(path))
    tensors = dict(load_file(path))
    names = sorted((name for name in tensors if name.startswith(TIER)), key=lambda name: int(name.removeprefix(TIER)))
    labels = TASKS[task].answer.read(tensors[LABELS]) if LABELS in tensors else None
    return Answers(task, tensors[ORIGINAL], [tensors[name] for name in names], labels, limit), tensors[KEYS]


def keys_array(keys: list[bytes]) -> Array:
    """Returns content keys as an array, uint8 `[n, 16]`."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1).copy()
