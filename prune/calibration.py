"""Calibration: batches of training rows of similar length, longest first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn

from foundation.core.runs import rows_of
from foundation.models.forward import device_of
from foundation.stage.context import Context
from foundation.training.rows import Rows
from foundation.training.train import Batch

BATCH_SIZE = 32


def calibration_batches(model: nn.Module, source: Path, number: int, context: Context, label: str) -> Iterator[Batch]:
    """Yields batches of calibration rows on the model's device.

    Args:
        model: The model that reads them.
        source: Checkpoint with its tokenizer or image processor.
        number: Most rows to use.
        context: Data, task, seed, progress.
        label: Label of the progress bar; empty for none.
    """
    chosen, device = context.data.calibration(number, context.seed), device_of(model)
    rows = Rows.prepare(chosen.rows, context.preprocessor(source))
    sizes = chosen.runs
    longest = np.argsort(-np.maximum.reduceat(rows.lengths, np.cumsum(sizes) - sizes), kind="stable")
    step = max(1, BATCH_SIZE // chosen.together)  # rows that belong together stay in one batch
    with context.progress.bar(label, len(chosen)) if label else nullcontext(lambda steps: None) as advance:
        for start in range(0, len(longest), step):
            indices = rows_of(sizes, longest[start : start + step])
            features = {name: value.to(device) for name, value in rows.batch(indices).items()}
            yield Batch(features, torch.from_numpy(chosen.labels.array[indices]).to(device), indices, 0, 1)
            advance(len(indices))
