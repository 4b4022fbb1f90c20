"""Learning from a teacher and from the labels: what recovery after pruning, sparse and quantization-aware training are trained on.

By default from its answers:

    classification  loss_b = (1 - a) * -log p_b[y_b] + a * T^2 KL(softmax(t_b / T) || softmax(z_b / T))      p = softmax(z)
    regression      loss_b = (1 - a) * (z_b - y_b)^2 + a * (z_b - t_b)^2
    generation      both parts of classification, as means over the tokens of a block (`compress.training.token_losses`)

z are the model's logits, t the teacher's (Hinton et al. 2015, https://arxiv.org/abs/1503.02531, section 2). With `loss` or `losses` it is
the objective of the stage `distill`, which the pipeline hands over: this module and the stages above it know the names alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.core.tasks import TASKS, Task
from compress.models.forward import forward
from compress.stage.context import Context
from compress.stage.taught import Asked, Learner, Taught
from compress.standalone.preprocess import Preprocessor
from compress.training.rows import Rows
from compress.training.token_losses import token_divergence, token_losses
from compress.training.train import Batch

TEMPERATURE = 2.0


CACHE_BYTES = 2**26
"""The teacher's logits are kept up to this size, and saved with every checkpoint; beyond it they are computed in every epoch."""


def check_taught(settings: Taught, asked: Asked, student: Any, teacher: Any, part: bool, context: Context) -> None:
    """Finds out before the first stage runs whether losses that are asked for by name fit; see `compress.stage.context.Losses.check`.

    Raises:
        InputError: They do not.
    """
    if settings.named:
        assert context.losses is not None, "the pipeline hands over the losses"
        context.losses.check(settings, asked, student, teacher, part, context)


def taught(learner: Learner, context: Context) -> nn.Module:
    """Returns the objective of learning from a teacher, which is frozen from now on.

    Args:
        learner: Who learns what, and who from.
        context: Data, task, seed; `scratch` is the folder of the training.

    Raises:
        InputError: A loss does not fit the models.
    """
    settings, prepared, theirs = learner.settings, learner.prepared, learner.theirs
    if settings.named:
        assert context.losses is not None, "the pipeline hands over the losses"
        return context.losses.objective(learner, context)
    rows = context.data.train.rows
    own = Rows.prepare(rows, theirs) if inputs_of(prepared) != inputs_of(theirs) else None
    num_logits = {"class": len(context.data.labels), "value": 1, "tokens": 0}[TASKS[context.task].answer]
    temperature = TEMPERATURE if settings.temperature is None else settings.temperature
    return Distilled(learner.teacher, context.task, len(rows), num_logits, temperature, settings.soft_weight, own)


def tokens_of(preprocessor: Preprocessor) -> tuple[Any, ...]:
    """Returns everything that decides which tokens a text gets: the contents of tokenizer.json, the length and the padding."""
    tokenizer = None if preprocessor.tokenizer is None else preprocessor.tokenizer.to_str()
    return tokenizer, preprocessor.max_length, preprocessor.pad_token_id, preprocessor.pad_token_type_id


def inputs_of(preprocessor: Preprocessor) -> tuple[Any, ...]:
    """Returns what decides what a model gets for a row: tokens and names of the inputs, or the steps that an image goes through."""
    return *tokens_of(preprocessor), preprocessor.input_names, preprocessor.image


@contextmanager
def attention_as_before(model: nn.Module) -> Iterator[None]:
    """Puts back which function the attention of a model goes through, as losses that look into it have a function of their own."""
    config: Any = model.config
    before = config._attn_implementation
    try:
        yield
    finally:
        if config._attn_implementation != before:
            model.set_attn_implementation(before)  # type: ignore[operator]


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
        if TASKS[self.task].answer == "value":
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
