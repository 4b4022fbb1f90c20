"""The table of losses, by answer."""

from __future__ import annotations

from typing import cast, get_args

from compress.core.tasks import TASKS, Task
from compress.machine.parallel import ALONE, Team
from compress.training.choices import OrderLoss, PairLoss
from compress.training.losses.answer_loss import AnswerLoss
from compress.training.losses.candidates import CandidateLoss
from compress.training.losses.classes import ClassLoss
from compress.training.losses.sets import SetLoss
from compress.training.losses.spans import SpanLoss
from compress.training.losses.tags import TagLoss
from compress.training.losses.tokens import TokenLoss
from compress.training.losses.transcripts import TranscriptLoss
from compress.training.losses.value import ValueLoss
from compress.training.losses.vector import VectorLoss


def losses_of(task: Task, loss: PairLoss | OrderLoss | None = None, team: Team = ALONE) -> AnswerLoss:
    """Returns the losses of a task.

    Args:
        task: The task.
        loss: The loss against labels, for tasks that have several (`loss_names`); None: the usual one.
        team: For vectors, the processes that share the rows of a batch.
    """
    if TASKS[task].orders:
        assert loss is None or loss in loss_names(task), (task, loss)
        return CandidateLoss(cast("OrderLoss | None", loss))
    losses: dict[str, AnswerLoss] = {
        "class": ClassLoss(),
        "labels": SetLoss(),
        "tags": TagLoss(),
        "transcript": TranscriptLoss(),
        "span": SpanLoss(),
        "value": ValueLoss(),
        "tokens": TokenLoss(),
        "vector": VectorLoss(cast("PairLoss | None", loss), team),
    }
    return losses[TASKS[task].answer]


def loss_names(task: Task) -> tuple[str, ...]:
    """Returns the names of the losses against labels that a task chooses from; empty for one that has a single loss."""
    facts = TASKS[task]
    return get_args(OrderLoss) if facts.orders else get_args(PairLoss) if facts.embeds and not facts.two_towers else ()
