"""The table of losses, by answer."""

from __future__ import annotations

from compress.core.tasks import TASKS, Task
from compress.machine.parallel import ALONE, Team
from compress.training.losses.answer_loss import AnswerLoss
from compress.training.losses.classes import ClassLoss
from compress.training.losses.sets import SetLoss
from compress.training.losses.spans import SpanLoss
from compress.training.losses.tags import TagLoss
from compress.training.losses.tokens import TokenLoss
from compress.training.losses.transcripts import TranscriptLoss
from compress.training.losses.value import ValueLoss
from compress.training.losses.vector import PairLoss, VectorLoss


def losses_of(task: Task, pairs: PairLoss | None = None, team: Team = ALONE) -> AnswerLoss:
    """Returns the losses of a task.

    Args:
        task: The task.
        pairs: For vectors, the loss of texts that belong together; None: the usual one of such labels.
        team: For vectors, the processes that share the rows of a batch.
    """
    losses: dict[str, AnswerLoss] = {
        "class": ClassLoss(),
        "labels": SetLoss(),
        "tags": TagLoss(),
        "transcript": TranscriptLoss(),
        "span": SpanLoss(),
        "value": ValueLoss(),
        "tokens": TokenLoss(),
        "vector": VectorLoss(pairs, team),
    }
    return losses[TASKS[task].answer]
