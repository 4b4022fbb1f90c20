"""The objective of recovery after pruning, sparse training and quantization-aware training: labels plus a teacher.

By default the student learns the logits of the teacher:

    loss_b = (1 - a) * labelled(z_b, y_b) + a * taught(z_b, t_b)        of the answer of the task (`foundation.training.losses`)

z are the logits of the model, t the logits of the teacher (Hinton et al. 2015, https://arxiv.org/abs/1503.02531, section 2). With `loss` or
`losses` it is the objective of the stage `distill`, injected by the pipeline; this module only knows the names of the losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.core.tasks import TASKS
from foundation.machine.device import computing_device
from foundation.machine.sharding import without_gradients
from foundation.models.architecture.context import check_context
from foundation.models.architecture.split import check_split
from foundation.models.forward import forward, freeze
from foundation.stage.context import Context
from foundation.stage.distillation import Distillation, DistillationSettings, SettingKeys
from foundation.standalone.preprocess import Preprocessor
from foundation.training.division import divided
from foundation.training.losses.answer_loss import AnswerLoss
from foundation.training.losses.table import losses_of
from foundation.training.rows import Rows
from foundation.training.teacher_logits import teacher_logits
from foundation.training.train import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TEMPERATURE = 2.0


CACHE_BYTES = 2**26
"""Teacher logits up to this size are cached; larger ones are recomputed in every epoch. Logits of part of the rows are saved with every
checkpoint."""


def check_distillation(
    settings: DistillationSettings,
    keys: SettingKeys,
    student: PreTrainedConfig,
    teacher: PreTrainedConfig | None,
    part: bool,
    context: Context,
) -> None:
    """Checks before the first stage runs that the named losses fit; see `foundation.stage.context.Losses.check`.

    Raises:
        InputError: They do not fit.
    """
    if settings.named:
        assert context.losses is not None, "the pipeline injects the losses"
        context.losses.check(settings, keys, student, teacher, part, context)


def distillation_objective(distillation: Distillation, context: Context) -> nn.Module:
    """Returns the objective of learning from a teacher; freezes the teacher.

    Args:
        distillation: Student, teacher and settings.
        context: Data, task, seed; `scratch` is the folder of this training.

    Raises:
        InputError: A loss does not fit the models.
    """
    settings, prepared, theirs = distillation.settings, distillation.prepared, distillation.theirs
    if settings.named:
        assert context.losses is not None, "the pipeline injects the losses"
        return context.losses.objective(distillation, context)
    rows = context.data.train.rows
    own = Rows.prepare(rows, theirs) if inputs_of(prepared) != inputs_of(theirs) else None
    if TASKS[context.task].embeds and prepared.width != theirs.width:
        given = f"vectors of {theirs.width} numbers, vectors of the student have {prepared.width}"
        raise InputError(f"{distillation.keys.teacher_key}: the teacher has {given}; give a teacher with vectors of the same width")
    if TASKS[context.task].per_token and tokens_of(prepared) != tokens_of(theirs):
        key = distillation.keys.teacher_key
        raise InputError(f"{key}: the teacher has other tokens than the student, and answers for every one; give one with the same")
    temperature = TEMPERATURE if settings.temperature is None else settings.temperature
    logits, cached = None, 0 if TASKS[context.task].per_token else theirs.width
    if distillation.teacher_id is not None and _fits(len(rows), cached):
        identity = {"teacher": distillation.teacher_id, "rows": context.data.train.digest, "max_length": context.max_length}
        inputs = own or Rows.prepare(rows, theirs)
        logits = teacher_logits(distillation.teacher.eval(), inputs, identity, context, distillation.keys.stage)
    elif context.team.size > 1:  # a process would cache its own rows alone, and a resumed training read the rows of the first one
        cached = 0
    losses = losses_of(context.task, team=context.team)
    return Distilled(distillation.teacher, losses, len(rows), cached, temperature, settings.soft_weight, own, logits)


def _fits(num_rows: int, num_logits: int) -> bool:
    return 0 < num_rows * num_logits * 4 <= CACHE_BYTES


def on_devices(teacher: nn.Module, context: Context, key: str) -> nn.Module:
    """Freezes a teacher and moves it to the device; where the model that learns is divided, so is the teacher.

    A teacher whose layers or tokens cannot be shared stays whole in every group of processes that share the student's.

    Args:
        teacher: A loaded model, on any device.
        context: The processes of the stage.
        key: Key path of the teacher, for messages.
    """
    freeze(teacher)
    if not context.team.whole.runs_together:
        return teacher.to(computing_device())
    problem = _unshared(teacher.config, context, key)
    if problem is not None:
        context.progress.log(f"  the teacher is not shared: {problem}")
    team = replace(context.team, sequence=False)  # what a teacher computes is not kept for backward
    divided(teacher, team, context.parallel, key, share=problem is None)
    return teacher


def _unshared(config: PreTrainedConfig, context: Context, key: str) -> str | None:
    """Returns why processes cannot share the layers or the tokens of a teacher; None if they can."""
    try:
        check_split(config, context.task, context.max_length, context.team.tensor, key)
        if context.team.context > 1:
            check_context(config, context.task, context.max_length, context.team.context, key)
    except InputError as error:
        return "; ".join(error.problems)
    return None


def tokens_of(preprocessor: Preprocessor) -> tuple[Any, ...]:
    """Returns everything that determines the tokens of a text: the contents of tokenizer.json, the maximum length and the padding."""
    tokenizer = None if preprocessor.tokenizer is None else preprocessor.tokenizer.to_str()
    return tokenizer, preprocessor.max_length, preprocessor.pad_token_id, preprocessor.pad_token_type_id


def inputs_of(preprocessor: Preprocessor) -> tuple[Any, ...]:
    """Returns everything that determines the inputs of a row: tokens and input names, or what is done to an image or a sound."""
    return *tokens_of(preprocessor), preprocessor.input_names, preprocessor.image, preprocessor.sound


@contextmanager
def attention_as_before(model: nn.Module) -> Iterator[None]:
    """Restores the attention implementation of a model afterwards, because losses on attention replace it."""
    config: PreTrainedConfig = model.config
    before = config._attn_implementation
    try:
        yield
    finally:
        if config._attn_implementation != before:
            model.set_attn_implementation(before)  # type: ignore[operator]


class Distilled(nn.Module):
    """The objective of learning from a teacher and from the labels.

    Args:
        teacher: The teacher; neither trained nor saved.
        losses: The losses of the task.
        num_rows: Number of training rows.
        num_logits: Number of logits of a row; 0 if they are too many to cache (an answer for every token).
        temperature: Temperature of both softmaxes.
        soft_weight: Weight of the teacher in the loss.
        rows: Training rows preprocessed for the teacher; None if teacher and student take the same features.
        logits: The teacher's logits for all rows, float32 `[n, C]`, if they are known.
    """

    logits: Tensor | None

    def __init__(
        self,
        teacher: nn.Module,
        losses: AnswerLoss,
        num_rows: int,
        num_logits: int,
        temperature: float,
        soft_weight: float,
        rows: Rows | None = None,
        logits: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.teacher = (freeze(teacher),)  # in a tuple, so that it is not a submodule
        self.losses, self.temperature, self.soft_weight, self.rows = losses, temperature, soft_weight, rows
        # a buffer, so that a resumed training reads the same logits: recomputed in another batch they differ in the last bits
        unknown = torch.full((num_rows, num_logits), torch.nan) if logits is None and _fits(num_rows, num_logits) else None
        self.register_buffer("logits", unknown if logits is None else logits, persistent=logits is None)

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the loss terms, float32 `[b]` each."""
        return self.parts(forward(model, batch.features), self.answers(batch), batch.labels)

    def parts(self, logits_bC: Tensor, target_bC: Tensor, labels_b: Tensor) -> dict[str, Tensor]:
        """Returns the loss terms for the logits of student and teacher, float32 `[b]` each."""
        hard, soft = 1 - self.soft_weight, self.soft_weight
        nothing = torch.zeros(len(logits_bC), device=logits_bC.device)  # what weighs nothing is not computed: it takes as much memory
        return {
            self.losses.named(labels_b): hard * self.losses.labelled(logits_bC, labels_b) if hard else nothing,
            "teacher": soft * self.losses.taught(logits_bC, target_bC, labels_b, self.temperature) if soft else nothing,
        }

    def features(self, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the features of a batch for the teacher."""
        if self.rows is None:
            return batch.features
        return {name: value.to(batch.labels.device) for name, value in self.rows.batch(batch.indices).items()}

    def answers(self, batch: Batch) -> Tensor:
        """Returns the teacher logits of a batch, float32 `[b, C]`; cached if the logits of all rows fit in `CACHE_BYTES`."""
        rows = torch.from_numpy(batch.indices).to(batch.labels.device)
        if self.logits is not None and not self.logits[rows].isnan().any():
            return self.logits[rows]
        with without_gradients(self.teacher[0]):
            answers_bC = forward(self.teacher[0], self.features(batch))
        answers_bC = answers_bC.clone()  # a tensor from inference mode cannot be part of a loss
        if self.logits is not None:
            self.logits[rows] = answers_bC
        return answers_bC
