"""Learning from a teacher's answers and from the labels: the objective of recovery after pruning and of quantization-aware training.

    classification  loss_b = (1 - a) * -log p_b[y_b] + a * T^2 KL(softmax(t_b / T) || softmax(z_b / T))      p = softmax(z)
    regression      loss_b = (1 - a) * (z_b - y_b)^2 + a * (z_b - t_b)^2
    generation      both parts of classification, as means over the tokens of a block (`compress.next_token`)

z are the model's logits, t the teacher's (Hinton et al. 2015, https://arxiv.org/abs/1503.02531, section 2). Left out: losses that look
inside of the teacher; the stage `distill` has those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.model import forward
from compress.next_token import token_divergence, token_losses
from compress.stage import Task
from compress.tasks import TASKS
from compress.train import Batch

if TYPE_CHECKING:
    from compress.training_rows import Rows

CACHE_BYTES = 2**26
"""The teacher's logits are kept up to this size, and saved with every checkpoint; beyond it they are computed in every epoch."""


class Distilled(nn.Module):
    """The objective of learning from a teacher and from the labels.

    Args:
        teacher: Not trained, not saved.
        task: The task.
        num_rows: Number of training rows.
        num_logits: Number of logits of a row; 0 where its logits are too many to be kept (generation).
        temperature: Softens both distributions.
        soft_weight: Share of the teacher in the loss.
        rows: The training rows as the teacher takes them; None where the features of a batch serve for both.
    """

    logits: Tensor | None

    def __init__(
        self,
        teacher: nn.Module,
        task: Task,
        num_rows: int,
        num_logits: int,
        temperature: float,
        soft_weight: float,
        rows: Rows | None = None,
    ) -> None:
        super().__init__()
        self.teacher = (teacher.eval().requires_grad_(False),)  # in a tuple: not a module of this one
        self.task, self.temperature, self.soft_weight, self.rows = task, temperature, soft_weight, rows
        # A buffer, so that a resumed training reads the same logits: computed anew in another batch they differ in the last bits.
        fits = 0 < num_rows * num_logits * 4 <= CACHE_BYTES
        self.register_buffer("logits", torch.full((num_rows, num_logits), torch.nan) if fits else None)

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the parts of the loss, float32 `[b]` each."""
        return self.parts(forward(model, batch.features), self.answers(batch), batch.labels)

    def parts(self, logits_bC: Tensor, target_bC: Tensor, labels_b: Tensor) -> dict[str, Tensor]:
        """Returns the parts of the loss of the model's logits, given the teacher's, float32 `[b]` each."""
        hard, soft = 1 - self.soft_weight, self.soft_weight
        if TASKS[self.task].answer == "tokens":
            return {
                "cross_entropy": hard * token_losses(logits_bC, labels_b),
                "teacher": soft * token_divergence(logits_bC, target_bC, labels_b, self.temperature),
            }
        if self.task == "text-regression":
            value_b = logits_bC[:, 0]
            return {"squared_error": hard * (value_b - labels_b).square(), "teacher": soft * (value_b - target_bC[:, 0]).square()}
        return {
            "cross_entropy": hard * functional.cross_entropy(logits_bC, labels_b, reduction="none"),
            "teacher": soft * soft_target_loss(logits_bC, target_bC, self.temperature),
        }

    def features(self, batch: Batch) -> Mapping[str, Tensor]:
        """Returns what the teacher gets for a batch."""
        if self.rows is None:
            return batch.features
        return {name: value.to(batch.labels.device) for name, value in self.rows.batch(batch.indices).items()}

    def answers(self, batch: Batch) -> Tensor:
        """Returns the teacher's logits of a batch, float32 `[b, C]`; computed once a row where all of them fit in memory."""
        rows = torch.from_numpy(batch.indices).to(batch.labels.device)
        if self.logits is not None and not self.logits[rows].isnan().any():
            return self.logits[rows]
        with torch.inference_mode():
            answers_bC = forward(self.teacher[0], self.features(batch))
        answers_bC = answers_bC.clone()  # a tensor of inference mode cannot take part in a loss
        if self.logits is not None:
            self.logits[rows] = answers_bC
        return answers_bC


def soft_target_loss(logits_bC: Tensor, target_bC: Tensor, temperature: float) -> Tensor:
    """Returns T^2 KL(softmax(target / T) || softmax(logits / T)) of each row, float32 `[b]`."""
    ours_bC, theirs_bC = (torch.log_softmax(values / temperature, dim=1) for values in (logits_bC, target_bC))
    return temperature**2 * functional.kl_div(ours_bC, theirs_bC, reduction="none", log_target=True).sum(dim=1)
