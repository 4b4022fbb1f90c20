"""The objective of recovery after pruning, sparse training and quantization-aware training: labels plus a teacher.

By default the student learns the logits of the teacher:

    loss_b = (1 - a) * labelled(z_b, y_b) + a * taught(z_b, t_b)        of the answer of the task (`foundation.training.losses`)

z are the logits of the model, t the logits of the teacher (Hinton et al. 2015, https://arxiv.org/abs/1503.02531, section 2). With `loss` or
`losses` it is the objective of the stage `distill` (`foundation.training.distillation.assembly`) for one teacher and the train split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.machine.device import computing_device
from foundation.models.architecture.context import check_context
from foundation.models.architecture.expert_shares import check_experts
from foundation.models.architecture.origin import Origin
from foundation.models.architecture.split import check_split
from foundation.models.forward import forward, freeze
from foundation.models.layers.expert_parallel import stack_listed
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor
from foundation.training.distillation.assembly import Loaded, StudentInputs, assembled
from foundation.training.distillation.plan import LossPlan
from foundation.training.distillation.settings import DistillationSettings
from foundation.training.distillation.teacher import inputs_of, tokens_of
from foundation.training.losses.answer_loss import AnswerLoss
from foundation.training.losses.distillation.presets import preset_of
from foundation.training.losses.table import losses_of
from foundation.training.processes.division import divided
from foundation.training.rows import Rows
from foundation.training.teacher_logits import teacher_logits
from foundation.training.train import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TEMPERATURE = 2.0


CACHE_BYTES = 2**26
"""Teacher logits up to this size are cached; larger ones are recomputed in every epoch. Logits of part of the rows are saved with every
checkpoint."""


@dataclass(frozen=True)
class Distillation:
    """A student, its teacher, and the losses."""

    settings: DistillationSettings
    """The losses."""
    key: str
    """Key path of the settings: `stages.ID.SECTION`."""
    model: nn.Module
    """The student, on its device."""
    source: Path
    """Checkpoint with the tokenizer or image processor of the student."""
    prepared: Preprocessor
    """Preprocessor of the student."""
    teacher: nn.Module
    """The teacher, on the same device."""
    theirs: Preprocessor
    """Preprocessor of the teacher."""
    origin: Origin | None
    """Maps the parts of the student to the teacher's, if it was cut from it; else None."""
    teacher_id: str | None = None
    """Digest of the teacher's artifact, if its logits for all rows are worth computing once, before the training; else None."""


def stage_of(key: str) -> str:
    """Returns the id of the stage with a setting, `ID` of `stages.ID.SECTION`."""
    return key.split(".")[1]


def teacher_key(key: str) -> str:
    """Returns the key path of the teacher of the stage with a setting, for messages."""
    return f"stages.{stage_of(key)}.teacher"


def plan_of(settings: DistillationSettings, key: str, part: bool) -> LossPlan:
    """Returns the losses that are named in some settings.

    Args:
        settings: The settings.
        key: Their key path.
        part: Whether the student is a pruned copy of the teacher.
    """
    preset = preset_of(settings.loss, settings.losses, settings.hard_weight, settings.temperature)
    return LossPlan(preset, settings.loss, stage_of(key), key, teacher_key(key), part)


def distillation_objective(distillation: Distillation, context: Context) -> nn.Module:
    """Returns the objective of learning from a teacher; freezes the teacher.

    Args:
        distillation: Student, teacher and settings.
        context: Data, task, seed; `scratch` is the folder of this training.

    Raises:
        InputError: A loss does not fit the models.
    """
    settings, prepared, theirs = distillation.settings, distillation.prepared, distillation.theirs
    split, key = context.data.train, teacher_key(distillation.key)
    if settings.named:
        assert context.teacher is not None, "the pipeline provides the teacher"
        plan = plan_of(settings, distillation.key, distillation.origin is not None)
        teacher = Loaded(context.teacher.id, freeze(distillation.teacher), theirs)
        return assembled(plan, distillation.model, [teacher], StudentInputs.of(split, prepared), context, distillation.origin)
    rows = split.rows
    own = Rows.prepare(rows, theirs) if inputs_of(prepared) != inputs_of(theirs) else None
    if context.facts.embeds and prepared.width != theirs.width:
        given = f"vectors of {theirs.width} numbers, vectors of the student have {prepared.width}"
        raise InputError(key, f"the teacher has {given}", remedy="give a teacher with vectors of the same width")
    if context.facts.answer.PER_TOKEN and tokens_of(prepared) != tokens_of(theirs):
        raise InputError(key, "the teacher has other tokens than the student, and answers for every one", remedy="give one with the same")
    temperature = TEMPERATURE if settings.temperature is None else settings.temperature
    logits, cached = None, 0 if context.facts.answer.PER_TOKEN else theirs.width
    if distillation.teacher_id is not None and _fits(len(rows), cached):
        identity = {"teacher": distillation.teacher_id, "rows": split.digest, "max_length": context.max_length}
        inputs = own or Rows.prepare(rows, theirs)
        logits = teacher_logits(distillation.teacher.eval(), inputs, identity, context, stage_of(distillation.key))
    elif context.team.size > 1:  # a process would cache its own rows alone, and a resumed training read the rows of the first one
        cached = 0
    losses = losses_of(context.task, team=context.team, labels=context.data.train.labels)
    soft_weight = settings.soft_weight if split.labels.KNOWN else 1.0
    return Distilled(distillation.teacher, losses, len(rows), cached, temperature, soft_weight, own, logits)


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
    if not context.team.without_pipeline.runs_together:
        return teacher.to(computing_device())
    problem = _unshared(teacher.config, context, key)
    if problem is not None:
        context.progress.log(f"  the teacher is not shared: {problem}")
    team = replace(context.team, sequence=False)  # what a teacher computes is not kept for backward
    if problem is None and team.experts > 1:
        stack_listed(teacher)
    divided(teacher, team, context.parallel, key, share=problem is None)
    return teacher


def _unshared(config: PreTrainedConfig, context: Context, key: str) -> str | None:
    """Returns why processes cannot share the layers or the tokens of a teacher; None if they can."""
    try:
        check_split(config, context.task, context.max_length, context.team.tensor, key)
        if context.team.experts > 1:
            check_experts(config, context.task, context.team.experts, key, learns=False)
        if context.team.context > 1:
            check_context(config, context.task, context.max_length, context.team.context, key)
    except InputError as error:
        return "; ".join(error.lines)
    return None


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
            self.losses.name: hard * self.losses.labelled(logits_bC, labels_b) if hard else nothing,
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
        with torch.no_grad():
            answers_bC = forward(self.teacher[0], self.features(batch))
        answers_bC = answers_bC.clone()  # a tensor from inference mode cannot be part of a loss
        if self.logits is not None:
            self.logits[rows] = answers_bC
        return answers_bC
