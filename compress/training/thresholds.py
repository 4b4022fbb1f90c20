"""Thresholds of labels of which any number may hold: each label is found above the score that is best for its F1 on selection rows.

They are put into the bias of the head,

    bias_c <- bias_c - t_c

so that everywhere afterwards a label holds where its logit is above 0 and its score above 0.5: in torch, in every engine, in the server,
and in all that is trained from this model. Scores are then no longer calibrated probabilities."""

from __future__ import annotations

import torch
from torch import nn

from compress.core.label_sets import best_thresholds, each_f1
from compress.measure.predictions import compared
from compress.stage.context import Context
from compress.standalone.preprocess import Preprocessor

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
    thresholds = best_thresholds(logits, split.labels, FEWEST)
    with torch.no_grad():
        head.bias.sub_(torch.from_numpy(thresholds).to(head.bias))
    moved = {name: float(value) for name, value in zip(context.data.labels, thresholds, strict=True) if value}
    before, after = (float(each_f1(logits > cut, split.labels).mean()) for cut in (0.0, thresholds))
    context.progress.log(
        f"  thresholds: {len(moved)} of {len(thresholds)} labels have one of their own; macro F1 {before:.4f} -> {after:.4f}"
    )
    return moved


def _head(model: nn.Module, outputs: int) -> nn.Linear | None:
    """Returns the last linear layer, if it makes the logits and has a bias."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    last = linears[-1] if linears else None
    return last if last is not None and last.bias is not None and last.out_features == outputs else None
