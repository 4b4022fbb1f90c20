"""The steps of distillation between the models and the training loop: each calls the file of its part, and tells the log.

    teacher_folder    a teacher from outside, imported                    `teacher`
    rows              what is learned from                                `rows`
    judged            what the weights kept are chosen by                 `ensemble`
    objective         the losses, and the answers that they compare with  `objective`, `teacher`, `masking`

`distill.distill` puts them in order.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.core.errors import InputError
from compress.core.tasks import TASKS
from compress.data.splits import Split
from compress.measure.predictions import compared
from compress.models.config import ModelConfig
from compress.models.importing import import_model
from compress.models.origin import Origin
from compress.stage.context import Context
from compress.stage.stage import is_model, teachers_named
from compress.standalone.preprocess import Preprocessor
from compress.training.rows import Rows
from compress.training.selection import EVALUATION_BATCH, answered, judged_by
from distill.capture import Capture, Wanted
from distill.ensemble import averaged, shares
from distill.masking import Masking, masking_of
from distill.objective import Objective
from distill.presets import Preset
from distill.rows import gather, gather_corpus
from distill.settings import DistillSettings
from distill.teacher import CACHE_BYTES, Pair, Teacher, about, cached_logits, takes_the_same


@dataclass(frozen=True)
class Steps:
    """What the steps share."""

    stage: DistillSettings
    source: Path
    """Checkpoint with the tokenizer or image processor of the student."""
    context: Context
    origin: Origin | None = None
    """Where the student's parts come from, if it is a part of the teacher."""

    def teacher_folder(self, number: int) -> Path:
        """Returns the checkpoint of one of the teachers; one from outside is imported as the recipe's own model is."""
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

    def rows(self) -> tuple[Split, int]:
        """Returns the rows to learn from, and how many of them, the first ones, have labels."""
        stage, data, log = self.stage, self.context.data, self.context.progress.log
        copies = stage.augment.copies if stage.augment else 0
        if stage.corpus is None:
            return gather(data, stage.fraction, stage.extra_text, copies, stage.key, log)
        packing = (self.source, self.context.max_length) if stage.pack else None
        return gather_corpus(data, stage.fraction, stage.corpus, packing, copies, stage.key, log)

    def judged(self, teachers: Sequence[nn.Module], theirs: Sequence[Preprocessor]) -> Context:
        """Returns the context with the teachers' answers in place of the labels of the selection split.

        Args:
            teachers: The models.
            theirs: How each takes its rows.
        """
        context = self.context
        rows = context.data.selection.rows
        if len(teachers) == 1 or not rows:
            return judged_by(context, teachers[0], theirs[0])
        logits = [torch.from_numpy(compared(*pair, rows, EVALUATION_BATCH)) for pair in zip(teachers, theirs, strict=True)]
        weights = shares(self.stage.teacher_weights, len(teachers))
        return answered(context, averaged(logits, weights, 1.0, TASKS[context.task].answer == "value").numpy())

    def objective(
        self,
        student: nn.Module,
        teachers: Sequence[nn.Module],
        prepared: Preprocessor,
        theirs: Sequence[Preprocessor],
        split: Split,
        num_labelled: int,
    ) -> Objective:
        """Puts the losses together, and computes the teachers' answers beforehand where they are all that is needed of them.

        Args:
            student: The model to train.
            teachers: Frozen.
            prepared: How the student takes its rows.
            theirs: How each teacher does.
            split: The rows to learn from.
            num_labelled: How many of them, the first ones, have labels.

        Raises:
            InputError: A loss does not fit the models.
        """
        stage, context = self.stage, self.context
        preset, generates = stage.resolved(), TASKS[context.task].answer == "tokens"
        settings = stage.settings(student.config, teachers[0].config, context)
        rows, masking = Rows.prepare(split.rows, prepared), None
        if stage.augment is not None:
            originals = len(split) // (1 + stage.augment.copies)
            masking = masking_of(stage.augment, self.source, context.seed, originals, f"{stage.key}.augment")
        asked = tuple(
            self._asked(number, teacher, prepared, theirs[number], split, rows, masking, preset) for number, teacher in enumerate(teachers)
        )
        few = None if num_labelled == len(split) else num_labelled
        weights = shares(stage.teacher_weights, len(teachers))
        pair = Pair(Capture(student, stage.key), asked, rows, split.labels, context.seed, few, weights, masking)
        objective = Objective(preset.losses, settings, pair, preset.temperature, preset.hard_weight, context.seed, context.task)
        wanted = [of_teacher for _, of_teacher in objective.wanted]
        only_logits = Wanted(logits=True) in wanted and not any(of_teacher.inside for of_teacher in wanted)
        config: Any = student.config
        fits = not generates and 4 * len(split) * config.num_labels * len(teachers) <= CACHE_BYTES
        if only_logits and fits and masking is None:
            for teacher, artifact in zip(asked, context.teachers, strict=True):
                identity = {"teacher": artifact.digest, "rows": split.digest, "max_length": context.max_length}
                teacher.logits = cached_logits(
                    teacher.capture.model, teacher.rows, identity, context.scratch, context.progress, stage.id or stage.NAME, context.team
                )
        return objective

    def _asked(
        self,
        number: int,
        teacher: nn.Module,
        prepared: Preprocessor,
        theirs: Preprocessor,
        split: Split,
        rows: Rows,
        masking: Masking | None,
        preset: Preset,
    ) -> Teacher:
        """Returns one of the teachers, ready to answer for the rows.

        Raises:
            InputError: It gets other tokens than the student, and something needs the same.
        """
        key, name = self.stage.teacher_key, teachers_named(self.stage)[number]
        alike = takes_the_same(prepared, theirs, split.rows)
        if not alike.tokens and prepared.generates:
            raise InputError(f"{key}: {name} has another vocabulary than the student; give one with the same tokens")
        if not alike.tokens and not all(loss.ANSWERS_ONLY for loss in preset.losses):
            raise InputError(
                f"{key}: {name} splits the rows into other tokens than the student; losses that look inside of it do "
                "not fit: give loss: soft_target"
            )
        if not alike.numbers and masking is not None:
            raise InputError(f"{self.stage.key}.augment: given, and {name} has other tokens than the student; leave it out")
        capture, own = Capture(teacher, key), rows if alike.inputs else Rows.prepare(split.rows, theirs)
        return Teacher(capture, own, alike.inputs, masking=masking, origin=self.origin)
