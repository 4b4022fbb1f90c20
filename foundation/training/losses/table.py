"""The table of losses, by answer."""

from __future__ import annotations

from typing import cast, get_args

from foundation.labels.answer import Answer
from foundation.labels.classes import ClassAnswer
from foundation.labels.form import Labels
from foundation.labels.label_sets import SetAnswer
from foundation.labels.next_token import TokenAnswer
from foundation.labels.spans import SpanAnswer
from foundation.labels.tags import TagAnswer
from foundation.labels.tasks import TASKS, Task
from foundation.labels.transcripts import TranscriptAnswer
from foundation.labels.value import ValueAnswer
from foundation.labels.vector import VectorAnswer
from foundation.machine.parallel import ALONE, Team
from foundation.training.choices import OrderLoss, PairLoss
from foundation.training.losses.answer_loss import AnswerLoss
from foundation.training.losses.candidates import CandidateLoss
from foundation.training.losses.classes import ClassLoss
from foundation.training.losses.sets import SetLoss
from foundation.training.losses.spans import SpanLoss
from foundation.training.losses.tags import TagLoss
from foundation.training.losses.tokens import TokenLoss
from foundation.training.losses.transcripts import TranscriptLoss
from foundation.training.losses.value import ValueLoss
from foundation.training.losses.vector import VectorLoss


def losses_of(task: Task, loss: PairLoss | OrderLoss | None = None, team: Team = ALONE, labels: Labels | None = None) -> AnswerLoss:
    """Returns the losses of a task.

    Args:
        task: The task.
        loss: The loss against labels, for tasks that have several (`loss_names`); None: the usual one.
        team: For vectors, the processes that share the rows of a batch.
        labels: For vectors, the labels of all training rows; None where only a teacher is learned from.
    """
    facts = TASKS[task]
    if facts.reranks:
        assert loss is None or loss in loss_names(task), (task, loss)
        return CandidateLoss(cast("OrderLoss | None", loss))
    losses: dict[type[Answer], AnswerLoss] = {
        ClassAnswer: ClassLoss(),
        SetAnswer: SetLoss(),
        TagAnswer: TagLoss(),
        TranscriptAnswer: TranscriptLoss(),
        SpanAnswer: SpanLoss(),
        ValueAnswer: ValueLoss(),
        TokenAnswer: TokenLoss(),
        VectorAnswer: VectorLoss(labels, cast("PairLoss | None", loss), team),
    }
    return losses[type(facts.answer)]


def loss_names(task: Task) -> tuple[str, ...]:
    """Returns the names of the losses against labels that a task chooses from; empty for one that has a single loss."""
    facts = TASKS[task]
    return get_args(OrderLoss) if facts.reranks else get_args(PairLoss) if facts.embeds_texts else ()
