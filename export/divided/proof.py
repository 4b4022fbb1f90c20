"""Proves that the ranks of a divided model give the answers of the undivided one: all ranks run in this process, a thread each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from export.divided.rank import load
from export.divided.ranks import Meeting
from export.parity.parity import ParityError
from foundation.artifacts.exported import DividedVariant
from foundation.data.splits import Split
from foundation.labels.tasks import Task
from foundation.measure.agreement import compare_predictions, shortfall
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load as load_whole
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor

BATCH_SIZE = 32


def prove(checkpoint: Checkpoint, folders: Sequence[Path], split: Split, preprocessor: Preprocessor, task: Task) -> DividedVariant:
    """Compares the answers of every rank with the answers of the undivided model.

    Args:
        checkpoint: The undivided checkpoint.
        folders: The folders of its ranks, in order.
        split: Rows to answer, with their labels.
        preprocessor: The preprocessor of the checkpoint.
        task: The task.

    Returns:
        What was compared: `disagreements`, `median_abs` and `max_abs` of the rank that is furthest
        from the undivided model, as for engines.

    Raises:
        ParityError: A rank does not agree with the undivided model, within the limits for engines.
    """
    expected = predict(load_whole(checkpoint.folder), preprocessor, split.rows, BATCH_SIZE)
    meeting = Meeting(len(folders))
    models = [load(folder, meeting.of(rank)) for rank, folder in enumerate(folders)]
    answers = meeting.together([lambda model=model: predict(model, preprocessor, split.rows, BATCH_SIZE) for model in models])  # type: ignore[misc]
    found = [compare_predictions(task, expected, answer, split.labels) for answer in answers]
    for rank, compared in enumerate(found):
        reason = shortfall(compared, "the undivided model")
        if reason is not None:
            raise ParityError(f"{folders[rank].name}: {reason}")
    worst = max(found, key=lambda compared: (compared["disagreements"], compared["max_abs"]))
    equal = all(np.array_equal(expected, answer) for answer in answers)
    furthest = {key: worst[key] for key in ("disagreements", "median_abs", "max_abs")}
    return DividedVariant(rows=len(split), equal=equal, **furthest)
