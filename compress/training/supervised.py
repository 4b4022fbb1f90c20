"""The objective of learning from the labels of the train split: the loss of the answer (`compress.training.losses`)."""

from __future__ import annotations

from torch import Tensor, nn

from compress.core import vectors
from compress.core.errors import InputError
from compress.core.tasks import TASKS, Task
from compress.data.splits import Data
from compress.models.forward import forward
from compress.training.losses.contrastive import contrastive_loss, scale_of
from compress.training.losses.table import losses_of
from compress.training.losses.vector import PairLoss
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
    if TASKS[task].searches and TASKS[task].embeds and not vectors.num_pairs(data.train.labels):
        raise InputError(
            f"{key}: learns from queries, and the data have none to train on: add qrels/train.tsv, or learn from a teacher alone"
        )


def supervised(task: Task, label_smoothing: float = 0.0, pairs: PairLoss | None = None) -> Objective:
    """Returns the objective of learning from labels alone.

    Args:
        task: The task.
        label_smoothing: Share of the target probability that is spread over all choices.
        pairs: For vectors, the loss of pairs; None: that of the task.
    """
    if TASKS[task].two_towers:
        return _contrastive
    losses = losses_of(task, pairs)

    def learn(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {losses.name: losses.labelled(forward(model, batch.features), batch.labels, label_smoothing)}

    return learn


def _contrastive(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The objective of two towers: their loss has a scale, and of SigLIP a bias, that are weights of the model."""
    vectors_nD = forward(model, batch.features)
    loss_n = contrastive_loss(vectors_nD, batch.labels, scale_of(model), getattr(model, "logit_bias", None))
    return {"contrastive": loss_n}
