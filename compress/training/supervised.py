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

from compress.core import vectors
from compress.core.errors import InputError
from compress.core.tasks import TASKS, Task
from compress.data.splits import Data
from compress.models.forward import forward
from compress.training.pair_losses import PairLoss, pair_loss
from compress.training.token_losses import token_losses
from compress.training.train import Batch, Objective


def check_labelled(task: Task, data: Data, key: str) -> None:
    """Checks that there are labels to learn from without a teacher.

    Args:
        task: The task.
        data: The data of the run.
        key: What learns, for the message.

    Raises:
        InputError: The train rows are documents, of which nobody said what they answer.
    """
    if TASKS[task].searches and TASKS[task].answer == "vector" and not vectors.num_pairs(data.train.labels):
        raise InputError(
            f"{key}: learns from queries, and the data have none to train on: add qrels/train.tsv, or learn from a teacher alone"
        )


def supervised(task: Task, label_smoothing: float = 0.0, pairs: PairLoss | None = None) -> Objective:
    """Returns the objective: cross entropy (of every next token for generation), squared error for regression, `pairs` for vectors (None:
    that of the task)."""
    loss = pairs or TASKS[task].pair_loss

    def classify(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = forward(model, batch.features)
        return {"cross_entropy": functional.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=label_smoothing)}

    def regress(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"squared_error": (forward(model, batch.features)[:, 0] - batch.labels).square()}

    def continue_text(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"cross_entropy": token_losses(forward(model, batch.features), batch.labels, label_smoothing)}

    def embed(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {loss: pair_loss(forward(model, batch.features), batch.labels, loss)}

    objectives: dict[str, Objective] = {"class": classify, "value": regress, "tokens": continue_text, "vector": embed}
    return objectives[TASKS[task].answer]
