"""The metric on the selection split during training, against the labels or the predictions of a teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from foundation.data.splits import Split
from foundation.measure.metrics import metrics
from foundation.measure.predictions import compared
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from numpy.typing import NDArray


EVALUATION_BATCH = 64


def selection_metric(context: Context, prepared: Preprocessor) -> Callable[[nn.Module], float] | None:
    """Returns the primary metric on the selection split as a function of the model; None if the split is empty."""

    split = context.data.selection
    if not len(split.rows):
        return None

    def value(model: nn.Module) -> float:
        logits = compared(model, prepared, split.rows, EVALUATION_BATCH)
        return metrics(context.task, logits, split.labels)[context.facts.metric]

    return value


def judged_by(context: Context, teacher: nn.Module, prepared: Preprocessor) -> Context:
    """Returns the context with the labels of the selection split replaced by the predictions of a teacher."""

    selection = context.data.selection
    return answered(context, compared(teacher, prepared, selection.rows, EVALUATION_BATCH)) if len(selection) else context


def answered(context: Context, logits: NDArray[Any]) -> Context:
    """Returns the context with the labels of the selection split replaced by the predictions of these logits, float32 `[n, C]`.

    Of vectors these are the cosines of pairs, or the documents that queries find; of scores of candidates, grades by their places.
    """
    selection = context.data.selection
    labels = selection.labels.pseudo_labels(logits)
    return replace(context, data=replace(context.data, selection=Split(selection.rows, labels)))
