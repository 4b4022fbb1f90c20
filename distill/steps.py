"""The steps of distillation that prepare training: each calls the module named on the right.

    teacher_folder, load_teachers   the teachers' checkpoints, and the frozen models   `teacher`
    rows                            the training rows                                  `rows`
    selection_context               the reference for choosing the best weights        `ensemble`
    objective                       the losses, and cached teacher logits              `objective`, `teacher`, `masking`

`distill.distill` calls them in order.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from distill.capture import Capture, Wanted
from distill.ensemble import shares
from distill.losses.loss import Shape
from distill.masking import Masking, masking_of
from distill.objective import Objective
from distill.on_policy import Sampling
from distill.presets import Preset
from distill.rows import gather, gather_corpus
from distill.settings import DistillSettings
from distill.teacher import CACHE_BYTES, Pair, Teacher, about, match_inputs
from foundation.core.errors import InputError
from foundation.core.tasks import TASKS
from foundation.data.splits import Split
from foundation.measure.predictions import compared
from foundation.models.architecture.origin import Origin
from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig
from foundation.models.importing import import_model
from foundation.stage.context import Context
from foundation.stage.stage import is_model, teachers_named
from foundation.standalone.preprocess import Preprocessor
from foundation.training.distilled import on_devices
from foundation.training.finetune import trained_here
from foundation.training.losses.table import losses_of
from foundation.training.rows import Rows
from foundation.training.selection import EVALUATION_BATCH, answered, judged_by
from foundation.training.teacher_logits import teacher_logits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class StudentInputs:
    """The training rows as inputs of the student; teachers with the same preprocessing share them."""

    split: Split
    preprocessor: Preprocessor
    rows: Rows
    masking: Masking | None


@dataclass(frozen=True)
class Steps:
    """The preparation of one distillation run."""

    stage: DistillSettings
    source: Path
    """Checkpoint with the tokenizer or image processor of the student."""
    context: Context
    origin: Origin | None = None
    """Which parts of the teacher the student kept, if it is a pruned copy of it."""

    def teacher_folder(self, number: int) -> Path:
        """Returns the checkpoint folder of a teacher; an external model is imported first, like the recipe's own model."""
        stage, context = self.stage, self.context
        teacher = context.teachers[number]
        if not is_model(teachers_named(stage)[number]):
            return teacher.path
        folder = context.scratch / f"teacher{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with about(stage.teacher_key):
            config = ModelConfig(path=str(teacher.path), task=context.task, head=stage.teacher_head)
            import_model(config, context.data.labels, context.seed, folder)
        return folder

    def load_teachers(self, folders: Sequence[Path], device: torch.device) -> list[nn.Module]:
        """Returns the frozen teachers on the device; with fsdp2 each process holds its shard of every block."""
        at = "cpu" if self.context.team.shards else device  # sharding moves them to the device block by block
        return [on_devices(load(folder, at), self.context, self.stage.teacher_key) for folder in folders]

    def rows(self) -> tuple[Split, int]:
        """Returns the training rows, and how many of them are labelled: these come first."""
        stage, data, log = self.stage, self.context.data, self.context.progress.log
        copies = stage.augment.copies if stage.augment else 0
        if stage.corpus is None:
            return gather(data, stage.fraction, stage.extra_text, copies, stage.key, log)
        packing = (self.source, self.context.max_length) if stage.pack else None
        return gather_corpus(data, stage.fraction, stage.corpus, packing, copies, stage.key, log)

    @property
    def selects_by_agreement(self) -> bool:
        """Whether the best weights are those that agree most with the teacher on the selection split, instead of with the labels.

        True if the baseline was trained outside this run, possibly on these rows. Never for text generation, whose labels are the text.
        """
        return not trained_here(self.context) and not TASKS[self.context.task].generates

    def selection_context(self, teachers: Sequence[nn.Module], teacher_preprocessors: Sequence[Preprocessor]) -> Context:
        """Returns the context with the teachers' predictions in place of the labels of the selection split.

        Args:
            teachers: The models.
            teacher_preprocessors: The preprocessor of each teacher.
        """
        context = self.context
        rows = context.data.selection.rows
        if len(teachers) == 1 or not rows:
            return judged_by(context, teachers[0], teacher_preprocessors[0])
        models = zip(teachers, teacher_preprocessors, strict=True)
        logits = [torch.from_numpy(compared(*model, rows, EVALUATION_BATCH)) for model in models]
        weights = shares(self.stage.teacher_weights, len(teachers))
        return answered(context, losses_of(context.task).averaged(logits, weights, 1.0).numpy())

    def objective(
        self,
        student: nn.Module,
        teachers: Sequence[nn.Module],
        preprocessor: Preprocessor,
        teacher_preprocessors: Sequence[Preprocessor],
        split: Split,
        num_labelled: int,
    ) -> Objective:
        """Builds the objective; computes and caches the teachers' logits if the losses need nothing else of them.

        Args:
            student: The model to train.
            teachers: The frozen teachers.
            preprocessor: The student's preprocessor.
            teacher_preprocessors: The preprocessor of each teacher.
            split: The training rows.
            num_labelled: How many of them are labelled: these come first.

        Raises:
            InputError: A loss does not fit the models.
        """
        stage, context, preset = self.stage, self.context, self.stage.resolved()
        inputs = StudentInputs(split, preprocessor, Rows.prepare(split.rows, preprocessor), self._masking(split))
        adapted = tuple(
            self._teacher(number, teacher, teacher_preprocessors[number], inputs, preset) for number, teacher in enumerate(teachers)
        )
        pair = Pair(
            student=Capture(student, stage.key),
            teachers=adapted,
            rows=inputs.rows,
            labels=split.labels,
            seed=context.seed,
            num_labelled=None if num_labelled == len(split) else num_labelled,
            weights=shares(stage.teacher_weights, len(teachers)),
            masking=inputs.masking,
            on_policy=None if stage.on_policy is None else Sampling(stage.on_policy, context.seed),
        )
        settings = stage.loss_settings(student.config, teachers[0].config, context)
        objective = Objective(
            preset.losses, settings, pair, preset.temperature, preset.hard_weight, context.seed, context.task, context.team
        )
        if self._can_cache_logits(objective, student.config, len(split)):
            self._cache_logits(adapted, split)
        return objective

    def _masking(self, split: Split) -> Masking | None:
        augment = self.stage.augment
        if augment is None:
            return None
        return masking_of(augment, self.source, self.context.seed, len(split) // (1 + augment.copies), f"{self.stage.key}.augment")

    def _teacher(self, number: int, model: nn.Module, teacher_preprocessor: Preprocessor, inputs: StudentInputs, preset: Preset) -> Teacher:
        """Returns a teacher with the training rows as its inputs.

        Raises:
            InputError: The teacher gets other tokens than the student, and a loss or the masking needs the same.
        """
        key, name = self.stage.teacher_key, teachers_named(self.stage)[number]
        match = match_inputs(inputs.preprocessor, teacher_preprocessor, inputs.split.rows)
        if not match.tokens and inputs.preprocessor.per_token:
            raise InputError(f"{key}: {name} has another vocabulary than the student; give a teacher with the same tokens")
        if not match.tokens and not all(loss.ANSWERS_ONLY for loss in preset.losses):
            raise InputError(
                f"{key}: {name} tokenizes the rows differently than the student; losses on hidden states or attention need equal tokens: "
                "give loss: soft_target"
            )
        if not match.ids and inputs.masking is not None:
            raise InputError(f"{self.stage.key}.augment: given, but {name} has other token ids than the student; remove augment")
        if self.stage.on_policy is not None and not match.inputs:
            raise InputError(f"{self.stage.key}.on_policy: given, but {name} takes other inputs than the student; remove on_policy")
        rows = inputs.rows if match.inputs else Rows.prepare(inputs.split.rows, teacher_preprocessor)
        return Teacher(Capture(model, key), rows, match.inputs, masking=inputs.masking, origin=self.origin)

    def _can_cache_logits(self, objective: Objective, config: PreTrainedConfig, num_rows: int) -> bool:
        """Whether the losses need only the teachers' logits, for fixed rows, and these fit into the cache."""
        wanted = [from_teacher for _, from_teacher in objective.wanted]
        only_logits = Wanted(logits=True) in wanted and not any(from_teacher.internals for from_teacher in wanted)
        many = TASKS[self.context.task].per_token
        fits = not many and 4 * num_rows * Shape.of(config).classes * len(objective.pair.teachers) <= CACHE_BYTES
        return only_logits and fits and objective.pair.masking is None

    def _cache_logits(self, teachers: Sequence[Teacher], split: Split) -> None:
        stage, context = self.stage, self.context
        for teacher, artifact in zip(teachers, context.teachers, strict=True):
            identity = {"teacher": artifact.digest, "rows": split.digest, "max_length": context.max_length}
            teacher.logits = teacher_logits(teacher.capture.model, teacher.rows, identity, context, stage.id or stage.NAME)
