"""Thresholds that are chosen on selection rows, for the best F1.

In multi-label classification each label has its own threshold. Thresholds are stored in the bias of the head,

    bias_c <- bias_c - t_c

so that everywhere afterwards a label holds where its logit is above 0 and its score above 0.5: in torch, in every engine, in the server,
and in all that is trained from this model. Scores are then no longer calibrated probabilities.

Where questions may have no answer, there is none if the score of that is more than a threshold above the score of the best span. It is put
into config.json (`foundation.models.heads.reader`), and stays with all that is made from this model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from foundation.labels import spans
from foundation.labels.form import Labels
from foundation.labels.label_sets import LabelSets, best_thresholds, each_f1
from foundation.measure.predictions import compared
from foundation.models.heads.reader import THRESHOLD_KEY
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor

FEWEST = 10
"""Selection rows that have to have a label, and to lack it, for a threshold of its own."""
BATCH_SIZE = 64


def fit_thresholds(model: nn.Module, prepared: Preprocessor, context: Context) -> dict[str, float]:
    """Shifts the bias of the head of a model, in place; returns the thresholds that were moved, logits by label.

    Args:
        model: A classifier with a head that ends in a linear layer with a bias.
        prepared: Its preprocessor.
        context: Its selection split is what they are chosen on.
    """
    split, head = context.data.selection, _head(model, len(context.data.labels))
    if not len(split) or head is None:
        return {}
    logits = compared(model, prepared, split.rows, BATCH_SIZE)
    true = split.labels.array
    thresholds = best_thresholds(logits, true, FEWEST)
    with torch.no_grad():
        head.bias.sub_(torch.from_numpy(thresholds).to(head.bias))
    moved = {name: float(value) for name, value in zip(context.data.labels, thresholds, strict=True) if value}
    before, after = (float(each_f1(logits > cut, true).mean()) for cut in (0.0, thresholds))
    context.progress.log(
        f"  thresholds: {len(moved)} of {len(thresholds)} labels have one of their own; macro F1 {before:.4f} -> {after:.4f}"
    )
    return moved


def fit_null_threshold(model: nn.Module, prepared: Preprocessor, context: Context) -> dict[str, float]:
    """Sets the threshold of no answer in the config of a model, in place; returns it by its key, or nothing where there always is one.

    Args:
        model: A model that finds spans.
        prepared: Its preprocessor.
        context: Its selection split is what it is chosen on.
    """
    split = context.data.selection
    if prepared.null_threshold is None or not len(split):
        return {}
    assert isinstance(split.labels, spans.Spans), type(split.labels)
    answers = compared(model, prepared, split.rows, BATCH_SIZE)
    more, best = spans.best_threshold(answers, split.labels)
    threshold, before = prepared.null_threshold + more, float(split.labels.values(answers)[0][:, 1].mean())
    setattr(model.config, THRESHOLD_KEY, threshold)
    context.progress.log(f"  threshold of no answer: {threshold:.4f}; F1 {before:.4f} -> {best:.4f}")
    return {THRESHOLD_KEY: threshold}


FITS: Mapping[type[Labels], Callable[[nn.Module, Preprocessor, Context], dict[str, float]]] = {
    LabelSets: fit_thresholds,
    spans.Spans: fit_null_threshold,
}
"""What chooses the thresholds of a form of labels; a form that is not here has none."""


def _head(model: nn.Module, outputs: int) -> nn.Linear | None:
    """Returns the last linear layer, if it makes the logits and has a bias."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    last = linears[-1] if linears else None
    return last if last is not None and last.bias is not None and last.out_features == outputs else None
