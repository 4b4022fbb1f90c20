"""The accuracy loss of quantization on the selection split, for mixed precision and `mode: auto`.

It is in the unit of `goals.max_drop`:

    by labels       loss = metric(float logits, labels) - metric(int8 logits, labels)
    by agreement    loss = share of rows with another prediction; regression: 1 - Pearson(float, int8); vectors: 1 - Pearson(cosines of
                    all pairs of rows in float, in int8)
    generation      loss = perplexity(int8) / perplexity(float) - 1, always by labels, as the text is its own label

Labels are used only if this run trained the model itself and so kept the selection rows out of training. An external model may have been
trained on these rows, which would inflate its metric; agreement between int8 and float is meaningful even then.

Evaluation rows are never used: the final figures are computed on them, so no choice may depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.core.arrays import Array
from foundation.labels.form import Labels
from foundation.labels.next_token import labels_of
from foundation.labels.tasks import TASKS, Task
from foundation.measure.judged import Judged, judged_of
from foundation.measure.metrics import Metric, primary
from foundation.measure.predictions import compared
from foundation.stage.context import Context
from foundation.standalone.preprocess import Row
from foundation.training.finetune import trained_here

if TYPE_CHECKING:
    from torch import nn

BATCH_SIZE = 64


@dataclass(frozen=True)
class Budget:
    """The float model's predictions, as the reference for quantized models."""

    checkpoint: Path
    rows: Sequence[Row]
    labels: Labels | None
    """Labels of the rows; None if they may not be used."""
    context: Context
    logits: Array
    """Logits of the float model, float32 [n, C]; for text generation the arrays [n, T, 2] of `foundation.labels.next_token`."""

    @classmethod
    def prepare(cls, model: nn.Module, checkpoint: Path, calibration: Sequence[Row], context: Context) -> Budget:
        """Runs the float model on the selection rows, or on calibration rows without their labels if there is no selection split."""
        split = context.data.selection
        rows, labels = (split.rows, split.labels if trained_here(context) else None) if len(split) else (list(calibration), None)
        if context.facts.generates:
            blocks: Any = rows
            labels = labels_of(blocks, context.max_length - 1)
        return cls(checkpoint, rows, labels, context, _predict(model, checkpoint, rows, context))

    @property
    def measure(self) -> str:
        """A description of the loss, for the report."""
        judged = self._judged
        if judged.metric.relative:
            return f"relative increase of {judged.name} on {len(self.rows)} selection blocks"
        if self.labels is not None:
            return f"{judged.name} lost on {len(self.rows)} selection rows"
        return self.context.facts.answer.DISAGREEMENT.format(n=len(self.rows))

    def loss(self, model: nn.Module) -> float:
        """Returns the loss of the model in its current state against the float model."""
        logits = _predict(model, self.checkpoint, self.rows, self.context)
        return loss(self.context.task, self.logits, logits, self.labels, self._judged.metric)

    @property
    def _judged(self) -> Judged:
        """The metric that `goals.max_drop` is about."""
        return judged_of(self.context.task, self.context.goals.metric, self.context.data.labels)


def loss(task: Task, reference: Array, logits: Array, labels: Labels | None, judged: Metric | None = None) -> float:
    """Returns the loss of logits `[n, C]` against reference logits `[n, C]`: of the judged metric (default: the primary one) by labels
    `[n]` if given, else by agreement."""
    if labels is not None:
        metric = primary(task) if judged is None else judged
        return metric.drop(metric.of(*labels.values(reference)), metric.of(*labels.values(logits)))
    return TASKS[task].answer.disagreement(reference, logits)


def _predict(model: nn.Module, checkpoint: Path, rows: Sequence[Row], context: Context) -> Array:

    return compared(model, context.preprocessor(checkpoint), rows, BATCH_SIZE)
