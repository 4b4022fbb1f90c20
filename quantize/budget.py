"""What quantization costs on the selection split, in the unit of `goals.max_drop`: what mixed precision and `mode: auto` decide by.

    by labels       loss = metric(float logits, labels) - metric(int8 logits, labels)
    by agreement    loss = share of rows answered differently; regression: 1 - Pearson(float, int8)
    generation      loss = perplexity(int8) / perplexity(float) - 1, always by labels: text is its own label, and what is lost is relative

Labels are used only where this run trained the model itself and so kept the selection rows out of its training. A model from outside may
have learned them by heart; the answers it gives there flatter it, but whether int8 gives the same answers can still be counted.

Left out: evaluation rows. The final figures are made on those, so no choice is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.core.next_token import labels_of
from compress.core.tasks import TASKS, Task
from compress.measure.answers import Array
from compress.measure.metrics import pearson, primary
from compress.measure.predictions import compared
from compress.stage.context import Context
from compress.standalone.preprocess import Row
from compress.training.finetune import trained_here

if TYPE_CHECKING:
    from torch import nn

BATCH_SIZE = 64


@dataclass(frozen=True)
class Budget:
    """The answers of the float model that a quantized one is held against."""

    checkpoint: Path
    rows: Sequence[Row]
    labels: Array | None
    """Of the rows, where they may be used."""
    context: Context
    logits: Array
    """Of the float model, float32 [n, C], or the answers [n, T, 2] of `compress.core.next_token`."""

    @classmethod
    def prepare(cls, model: nn.Module, checkpoint: Path, calibration: Sequence[Row], context: Context) -> Budget:
        """Asks the float model for the selection rows; calibration rows, without their labels, where there are none."""
        split = context.data.selection
        rows, labels = (split.rows, split.labels if trained_here(context) else None) if len(split) else (list(calibration), None)
        if TASKS[context.task].answer == "tokens":
            blocks: Any = rows
            labels = labels_of(blocks, context.max_length - 1)
        return cls(checkpoint, rows, labels, context, _predict(model, checkpoint, rows, context))

    @property
    def measure(self) -> str:
        """What a loss is, in words."""
        if primary(self.context.task).relative:
            return f"relative increase of {TASKS[self.context.task].metric} on {len(self.rows)} selection blocks"
        if self.labels is not None:
            return f"{TASKS[self.context.task].metric} lost on {len(self.rows)} selection rows"
        if TASKS[self.context.task].answer == "value":
            return f"1 - Pearson to the float answers on {len(self.rows)} selection rows"
        return f"share of {len(self.rows)} selection rows answered differently"

    def loss(self, model: nn.Module) -> float:
        """Returns what the model as it is now loses against the float one."""
        return loss(self.context.task, self.logits, _predict(model, self.checkpoint, self.rows, self.context), self.labels)


def loss(task: Task, reference: Array, logits: Array, labels: Array | None) -> float:
    """Returns the loss of logits `[n, C]` against reference logits `[n, C]`, by labels `[n]` or, without, by agreement."""
    if labels is not None:
        metric = primary(task)
        return metric.drop(metric.of(reference, labels), metric.of(logits, labels))
    if TASKS[task].answer == "value":
        return 1.0 - pearson(reference[:, 0], logits[:, 0])
    return float(np.mean(reference.argmax(axis=1) != logits.argmax(axis=1)))


def _predict(model: nn.Module, checkpoint: Path, rows: Sequence[Row], context: Context) -> Any:

    return compared(model, context.preprocessor(checkpoint), rows, BATCH_SIZE)
