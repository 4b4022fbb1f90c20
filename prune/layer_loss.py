"""Layer loss: a block is as important as the loss of the model without it is high.

    score_l = mean over calibration rows of loss(model without block l)          without: y = x instead of y = block(x)

The loss is the one of the task (`foundation.training.supervised`): cross entropy, or squared error for regression. Of a language model it
is the log of the perplexity, where blocks of text have equal length. Rows come from the train split and need labels. Each block takes a
forward pass; unlike block influence (`prune.activation`), the loss shows what a block contributes to the answer.

Minitron: Muralidharan et al. 2024, https://arxiv.org/abs/2407.14679, section 2.2 (depth, by perplexity). Left out: the search for the best
set of several blocks. Each is scored with all others present, and those with the lowest scores go together; `schedule: cubic` scores again
after every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from foundation.models.architecture.structure import Structure
from foundation.training.train import Batch, Objective
from prune.masks.masks import masked


def losses_without(model: nn.Module, structure: Structure, batches: Callable[[], Iterable[Batch]], objective: Objective) -> Tensor:
    """Returns the mean loss over all rows with each block skipped, float32 `[L]`; the blocks of an encoder-decoder count through.

    Args:
        model: The model, in evaluation mode; it is not changed.
        structure: Its structure.
        batches: Starts a pass over the calibration rows.
        objective: The loss of a batch.
    """
    sums_L, rows = torch.zeros(structure.depth, dtype=torch.float64), 0
    with torch.no_grad():
        for batch in batches():
            for block in range(structure.depth):
                with masked(model, structure, {(block, "layer"): _closed}):
                    loss_b = torch.stack(list(objective(model, batch).values())).sum(dim=0)
                sums_L[block] += loss_b.double().sum().cpu()
            rows += len(batch.indices)
    return (sums_L / rows).float()


def _closed(training: bool) -> Tensor:
    return torch.zeros(())
