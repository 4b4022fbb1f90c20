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

import torch
from torch import nn

from distill.on_policy import Sampling
from distill.rows import gather, gather_corpus
from distill.settings import DistillSettings
from foundation.data.splits import Split
from foundation.measure.predictions import compared
from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig
from foundation.models.importing import import_model
from foundation.stage.context import Context
from foundation.stage.stage import is_model, teachers_named
from foundation.standalone.preprocess import Preprocessor
from foundation.training.distillation.assembly import Loaded, StudentInputs, assembled
from foundation.training.distillation.distilled import on_devices
from foundation.training.distillation.ensemble import shares
from foundation.training.distillation.masking import Masking, masking_of
from foundation.training.distillation.objective import Objective
from foundation.training.distillation.teacher import about
from foundation.training.finetune import trained_here
from foundation.training.losses.table import losses_of
from foundation.training.selection import EVALUATION_BATCH, answered, judged_by


@dataclass(frozen=True)
class Steps:
    """The preparation of one distillation run."""

    stage: DistillSettings
    source: Path
    """Checkpoint with the tokenizer or image processor of the student."""
    context: Context

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
        return not trained_here(self.context) and not self.context.facts.generates

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
        """Returns the objective (`foundation.training.distillation.assembly`).

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
        stage, context = self.stage, self.context
        on_policy = None if stage.on_policy is None else Sampling(stage.on_policy, context.seed)
        inputs = StudentInputs(split, preprocessor, num_labelled, self._masking(split), on_policy)
        loaded = [Loaded(*teacher) for teacher in zip(teachers_named(stage), teachers, teacher_preprocessors, strict=True)]
        return assembled(stage.plan, student, loaded, inputs, context, weights=stage.teacher_weights)

    def _masking(self, split: Split) -> Masking | None:
        augment = self.stage.augment
        if augment is None:
            return None
        return masking_of(augment, self.source, self.context.seed, len(split) // (1 + augment.copies), f"{self.stage.key}.augment")
