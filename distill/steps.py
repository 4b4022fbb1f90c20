"""The steps of distillation that prepare training: each calls the module named on the right.

    teacher_folder, load_teachers   the teachers' checkpoints, and the frozen models   `teacher`
    from_teachers, from_labeller    what the student learns from                       `assembly`, `distill.labeller.goal`
    rows                            the training rows                                  `rows`
    selection_context               the reference for choosing the best weights        `ensemble`
    objective                       the losses, and cached teacher logits              `objective`, `teacher`, `masking`

`distill.distill` calls them in order.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from distill.labeller.goal import goal
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
from foundation.training.distillation.assembly import Loaded, StudentInputs, assembled, with_targets
from foundation.training.distillation.distilled import on_devices
from foundation.training.distillation.ensemble import shares
from foundation.training.distillation.masking import Masking, masking_of
from foundation.training.distillation.objective import Objective
from foundation.training.distillation.teacher import about
from foundation.training.finetune import trained_here
from foundation.training.losses.table import losses_of
from foundation.training.selection import EVALUATION_BATCH, answered, judged_by


@dataclass(frozen=True)
class Lesson:
    """What a student learns, and how its weights are chosen."""

    split: Split
    """The training rows."""
    num_labelled: int
    """How many of them are labelled: these come first."""
    objective: Objective
    judged: Context
    """The context whose selection labels choose the best weights."""
    by_agreement: bool
    """Whether these labels are the teacher's."""
    teacher: str
    """What is reported as the teacher."""
    sources: list[str]
    """Digests of the teachers, or of the soft targets."""
    cached: bool
    """Whether the teacher's logits are known before the training."""
    figures: Mapping[str, object] = field(default_factory=dict)
    """Figures of a labeller."""
    save: Callable[[Path], None] = lambda folder: None
    """Writes what is kept next to the checkpoint."""


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

    def from_teachers(self, student: nn.Module, prepared: Preprocessor, folders: Sequence[Path], device: torch.device) -> Lesson:
        """Returns what a student learns from models of the task.

        Args:
            student: The model to train.
            prepared: Its preprocessor.
            folders: Checkpoints of the teachers.
            device: Where they run.

        Raises:
            InputError: A loss does not fit the models.
        """
        context = self.context
        assert context.teachers, "the pipeline provides the teachers"
        teachers = self.load_teachers(folders, device)
        theirs = [context.preprocessor(folder) for folder in folders]
        split, num_labelled = self.rows()
        objective = self.objective(student, teachers, prepared, theirs, split, num_labelled)
        return Lesson(
            split,
            num_labelled,
            objective,
            self.selection_context(teachers, theirs) if self.selects_by_agreement and self.stage.corpus is None else context,
            self.selects_by_agreement,
            " + ".join(teacher.id for teacher in context.teachers),
            [teacher.digest for teacher in context.teachers],
            objective.pair.teacher.logits is not None,
        )

    def from_labeller(self, student: nn.Module, prepared: Preprocessor) -> Lesson:
        """Returns what a student learns from a language model that labels the rows.

        Args:
            student: The model to train.
            prepared: Its preprocessor.

        Raises:
            InputError: See `distill.labeller.goal.goal`.
        """
        stage, context = self.stage, self.context
        assert stage.labeller is not None, "the teachers are models of the task"
        split, num_labelled = self.rows()
        found = goal(stage.labeller, split, num_labelled, context, (stage.title, stage.teacher_key))
        inputs = StudentInputs(found.split, prepared, found.num_labelled)
        objective = with_targets(stage.plan, student, torch.from_numpy(found.targets_nC), inputs, context)
        by_agreement = stage.resolved().hard_weight == 0 and not stage.labeller.reads_labels
        written = found.written
        return Lesson(
            found.split,
            found.num_labelled,
            objective,
            answered(context, found.selection_nC) if by_agreement and len(context.data.selection) else context,
            by_agreement,
            stage.labeller.path or f"{stage.labeller.model} at {stage.labeller.url}",
            [hashlib.sha256(found.targets_nC.tobytes()).hexdigest()],
            cached=True,
            figures={"labeller": found.figures},
            save=(lambda folder: None) if written is None else partial(written.save, classes=context.data.labels),
        )

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
