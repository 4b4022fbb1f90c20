"""The losses of this package in other stages that train against a teacher: recovery after pruning, sparse and quantization-aware training.

Those stages do not know this package: the pipeline hands `Injected` over to them (`compress.stage.context.Losses`), and they say what they
want by name (`compress.stage.distillation.DistillationSettings`). What becomes of it is what the stage `distill` would make of the same
keys, with one thing more: of a teacher whose parts the student is made of only those parts are seen (`compress.models.origin`), so that
every layer, channel and head learns from the one that it was. There layers are counted among those that are left. Left out: rows of their
own (`extra_text`, `augment`, `corpus`), several teachers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from torch import nn

from compress.core.errors import InputError
from compress.core.problems import explain
from compress.machine.parallel import ALONE
from compress.stage.context import Context
from compress.stage.distillation import Distillation, DistillationSettings, SettingKeys
from distill.distill import Distill
from distill.steps import Steps
from distill.teacher import freeze


class _Lesson(Distill):
    """The stage `distill` without a student or rows of its own: its losses, and what they fit."""

    where: str
    """Key path of the settings, for messages."""
    taught_by: str
    """That of the teacher."""
    made_of_teacher: bool

    @property
    def part(self) -> bool:
        return self.made_of_teacher

    @property
    def key(self) -> str:
        return self.where

    @property
    def teacher_key(self) -> str:
        return self.taught_by


class Injected:
    """Losses by name for stages that are no part of this package; see `compress.stage.context.Losses`."""

    def check(self, settings: DistillationSettings, keys: SettingKeys, student: Any, teacher: Any, part: bool, context: Context) -> None:
        """Finds out before the first stage runs whether losses fit two models and the task.

        Args:
            settings: Which losses.
            keys: Key paths of the settings, for messages.
            student: Transformers config of the model that is trained.
            teacher: That of its teacher.
            part: Whether the student is made of parts of the teacher.
            context: Data and task.

        Raises:
            InputError: They do not, or a setting of a loss is not one.
        """
        self._lesson(settings, keys, part).check(student, teacher, replace(context, team=ALONE))

    def objective(self, distillation: Distillation, context: Context) -> nn.Module:
        """Returns what a model is trained on; it holds the teacher.

        Args:
            distillation: Student, teacher and losses.
            context: Data, seed, progress; `scratch` is the folder of the training.

        Raises:
            InputError: A loss does not fit the models.
        """
        assert context.teacher is not None, "the pipeline hands over the teacher"
        lesson = self._lesson(distillation.settings, distillation.keys, distillation.origin is not None)
        lesson = lesson.model_copy(update={"teacher": context.teacher.id})  # for messages
        steps, split = Steps(lesson, distillation.source, replace(context, team=ALONE), distillation.origin), context.data.train
        teachers, prepared = [freeze(distillation.teacher)], distillation.prepared
        return steps.objective(distillation.model, teachers, prepared, [distillation.theirs], split, len(split))

    def _lesson(self, settings: DistillationSettings, keys: SettingKeys, part: bool) -> _Lesson:
        given = {"loss": settings.loss, "losses": settings.losses, "temperature": settings.temperature, "hard_weight": settings.hard_weight}
        micro = getattr(settings, "micro_batch_size", None)
        own = {"id": keys.stage, "where": keys.key, "taught_by": keys.teacher_key, "made_of_teacher": part, "micro_batch_size": micro}
        try:
            return _Lesson.model_validate({**given, **own})
        except ValidationError as error:
            raise InputError(*explain(error, _Lesson, keys.key)) from error
