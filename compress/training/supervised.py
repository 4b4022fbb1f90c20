"""The objective of learning from the labels of the train split.

    classification  loss_b = (1 - e) * -log p_b[y_b] + e * mean_c -log p_b[c]      e: label smoothing (https://arxiv.org/abs/1512.00567)
    regression      loss_b = (z_b - y_b)^2
    generation      loss_b = mean over the tokens t of a block of the classification loss, with y the token after t
    vectors         loss_b of `compress.training.pair_losses`

with p = softmax of the logits z.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from compress.core.tasks import TASKS, Task
from compress.models.forward import forward
from compress.training.pair_losses import PairLoss, pair_loss
from compress.training.token_losses import token_losses
from compress.training.train import Batch, Objective


def supervised(task: Task, label_smoothing: float = 0.0, pairs: PairLoss = "cosine") -> Objective:
    """Returns the objective: cross entropy (of every next token for generation), squared error for regression, `pairs` for vectors."""

    def classify(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = forward(model, batch.features)
        return {"cross_entropy": functional.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=label_smoothing)}

    def regress(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"squared_error": (forward(model, batch.features)[:, 0] - batch.labels).square()}

    def continue_text(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"cross_entropy": token_losses(forward(model, batch.features), batch.labels, label_smoothing)}

    def embed(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {pairs: pair_loss(forward(model, batch.features), batch.labels, pairs)}

    objectives: dict[str, Objective] = {"class": classify, "value": regress, "tokens": continue_text, "vector": embed}
    return objectives[TASKS[task].answer]
