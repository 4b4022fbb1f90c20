"""The objective of learning from the labels of the train split: the loss of the answer (`foundation.training.losses`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.core.named import one_of
from foundation.data.splits import Data
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.labels.text_groups import Groups
from foundation.machine.parallel import ALONE, Team
from foundation.models.forward import forward
from foundation.models.heads.embedding import EMBEDDING_KEY
from foundation.stage.context import Context
from foundation.training.choices import OrderLoss, PairLoss
from foundation.training.losses.answer_loss import AnswerLoss
from foundation.training.losses.contrastive import contrastive_loss, images_first, in_order_of_rows, scale_of
from foundation.training.losses.margin_mse import LARGEST
from foundation.training.losses.table import loss_names, losses_of
from foundation.training.losses.vector import chosen, compares_rows
from foundation.training.processes.gathered import gathered
from foundation.training.train import Batch, Objective

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from foundation.training.distillation.settings import DistillationSettings


def check_labelled(task: Task, data: Data, key: str) -> None:
    """Checks that there are labels to learn from without a teacher.

    Args:
        task: The task.
        data: The data of the run.
        key: What learns, for the message.

    Raises:
        InputError: The train rows have no labels, or are documents without queries.
    """
    facts = TASKS[task]
    check_known(data, key, "learn from a teacher alone: distill, or recover and qat with distill: true")
    if facts.searches and facts.embeds and not isinstance(data.train.labels, Groups):
        raise InputError(
            key, "learns from queries, and the data have none to train on", remedy="add qrels/train.tsv, or learn from a teacher alone"
        )


def check_known(data: Data, key: str, remedy: str, given: str = "") -> None:
    """Checks that the train rows have labels.

    Args:
        data: The data of the run.
        key: Key of what reads the labels, for the message.
        remedy: What to do, for the message.
        given: The value of the key; empty for a whole section.

    Raises:
        InputError: They have none (`data.train_labels: false`).
    """
    if not data.train.labels.KNOWN:
        what = f"{given} given, which reads" if given else "reads"
        raise InputError(key, f"{what} the labels of the train rows, and these have none (data.train_labels: false)", remedy=remedy)


def check_label_weight(settings: DistillationSettings, data: Data, key: str) -> None:
    """Checks that no weight is given to labels that are unknown. Weights that the recipe leaves out count as 0 then.

    Raises:
        InputError: One is given.
    """
    if settings.named:
        name, given = "hard_weight", bool(settings.hard_weight)
    else:
        usual = type(settings).model_fields["soft_weight"].default
        name, given = "soft_weight", settings.soft_weight not in (usual, 1)
    if given:
        check_known(data, f"{key}.{name}", "leave it out")


def check_loss(
    config: PreTrainedConfig, context: Context, key: str, micro_batch_size: int | None, loss: PairLoss | OrderLoss | None = None
) -> None:
    """Checks that the loss fits the task, the rows and the model, and that no micro-batches part what it compares.

    Args:
        config: Transformers config of the model.
        context: Task and data.
        key: Key path of the settings of what learns from the labels, for messages.
        micro_batch_size: Rows in memory at once; None: a whole batch, or micro-batches whose rows are compared all the same
            (`foundation.training.grad_cache`).
        loss: The loss that the recipe names; None: the usual one of the rows.

    Raises:
        InputError: It does not.
    """
    facts, labels, names = context.facts, context.data.train.labels, loss_names(context.task)
    if loss is not None and loss not in names:
        tasks = [name for name in TASKS if loss in loss_names(name)]
        remedy = f"give {one_of(names)}" if names else "leave it out"
        raise InputError(f"{key}.loss", f"{loss} given", f"it is for {one_of(tasks)}", remedy)
    if not facts.embeds_texts:
        return
    groups = labels if isinstance(labels, Groups) else None
    margins = None if groups is None else groups.margins
    if loss == "cosine" and groups is not None:
        raise InputError(f"{key}.loss", "cosine given", "it learns scores, and the train rows have none", "give ranking or triplet")
    if loss == "margin_mse" and margins is None:
        learns = "it learns margins between positives and negatives, and the train rows have none"
        raise InputError(f"{key}.loss", "margin_mse given", learns, "set data.columns.margin, or distill with it")
    name = chosen(cast("PairLoss | None", loss), labels)
    largest = float(np.abs(margins).max()) if margins is not None and name == "margin_mse" else 0.0
    if largest > LARGEST and (getattr(config, EMBEDDING_KEY, None) or {}).get("normalize"):
        reach = f"data.columns.margin reaches {largest:g}, and vectors of length 1, as this model gives, have margins of at most"
        raise InputError(f"{key}.loss", "margin_mse given", f"{reach} {LARGEST:g}", "divide the margins by a number that is large enough")
    if micro_batch_size is not None and compares_rows(name, labels):
        raise InputError(f"{key}.micro_batch_size", f"{micro_batch_size} given", f"{name} compares the rows of a batch", "leave it out")


def supervised(
    task: Task,
    label_smoothing: float = 0.0,
    loss: PairLoss | OrderLoss | None = None,
    team: Team = ALONE,
    labels: Labels | None = None,
) -> Objective:
    """Returns the objective of supervised learning.

    Args:
        task: The task.
        label_smoothing: Share of the target probability that is spread over all choices.
        loss: The loss, for tasks that have several (`foundation.training.losses.table.loss_names`); None: the usual one.
        team: For vectors, the processes that share the rows of a batch.
        labels: The labels of all training rows, which vectors read. The objective raises an `InputError` if they are unknown.
    """
    if labels is not None and not labels.KNOWN:
        return _unlabelled
    if TASKS[task].two_towers:
        return partial(_contrastive, team)
    return Supervised(losses_of(task, loss, team, labels), label_smoothing)


class Supervised:
    """The objective of supervised learning.

    Args:
        losses: The losses of the task.
        label_smoothing: Share of the target probability that is spread over all choices.
    """

    def __init__(self, losses: AnswerLoss, label_smoothing: float) -> None:
        self.losses, self.label_smoothing = losses, label_smoothing

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the loss of the labels."""
        return self.terms(forward(model, batch.features), torch.empty(0), batch)

    def compares_rows(self) -> bool:
        """Whether the loss compares rows that a micro-batch may part."""
        return self.losses.compares_rows()

    def beside(self, batch: Batch) -> Tensor:
        """Nothing."""
        return torch.empty(0)

    def terms(self, answers_bD: Tensor, beside_bE: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns the loss of the labels, given the answers of the model."""
        return {self.losses.name: self.losses.labelled(answers_bD, batch.labels, self.label_smoothing)}


def _unlabelled(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Refuses to learn from labels that are unknown, in case that no check before the run did."""
    raise InputError("data.train_labels", "false given, and a loss reads the labels of the train rows", remedy="learn from a teacher alone")


def _contrastive(team: Team, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The objective of two towers: their loss has a scale, and of SigLIP a bias, that are weights of the model."""
    vectors_nD, labels_n3 = forward(model, batch.features), batch.labels
    scale, bias = scale_of(model), getattr(model, "logit_bias", None)
    if team.data_size == 1:
        return {"contrastive": contrastive_loss(vectors_nD, labels_n3, scale, bias)}
    every = gathered(in_order_of_rows(vectors_nD, batch.labels), batch.labels, team)
    loss_n = contrastive_loss(images_first(every.vectors_nD, every.labels_nk), every.labels_nk, scale, bias, every.own_n)
    return {"contrastive": every.own(loss_n)}
