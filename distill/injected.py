"""Distillation losses for other stages: recovery after pruning, sparse training, quantization-aware training.

Those stages do not import this package: the pipeline injects `Injected` (`foundation.stage.context.Losses`), and a stage names its losses
in its settings (`foundation.stage.distillation.DistillationSettings`). The keys mean what they mean in the stage `distill`, with one
addition: if the student is a pruned copy of the teacher, only the kept layers, channels and heads of the teacher are captured
(`foundation.models.architecture.origin`), so that each one learns from its original. Layer numbers then count the kept layers. Not
supported: further training rows (`extra_text`, `augment`, `corpus`) and several teachers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import ValidationError
from torch import nn

from distill.distill import Distill
from distill.steps import Steps
from foundation.core.errors import InputError
from foundation.core.problems import explain
from foundation.models.forward import freeze
from foundation.stage.context import Context
from foundation.stage.distillation import Distillation, DistillationSettings, SettingKeys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class _InjectedStage(Distill):
    """The stage `distill` without a student and rows of its own: only its losses and their checks."""

    JOINS_MICRO_BATCHES: ClassVar[bool] = False  # stages wrap the objective: in gates, without dropout
    settings_key: str
    """Key path of the settings, for error messages."""
    key_of_teacher: str
    """Key path of the teacher, for error messages."""
    student_is_pruned_teacher: bool

    @property
    def student_is_part(self) -> bool:
        return self.student_is_pruned_teacher

    @property
    def key(self) -> str:
        return self.settings_key

    @property
    def teacher_key(self) -> str:
        return self.key_of_teacher


class Injected:
    """Distillation losses by name for stages outside this package; see `foundation.stage.context.Losses`."""

    def check(
        self,
        settings: DistillationSettings,
        keys: SettingKeys,
        student: PreTrainedConfig,
        teacher: PreTrainedConfig | None,
        part: bool,
        context: Context,
    ) -> None:
        """Checks, before the first stage runs, that losses fit two models and the task.

        Args:
            settings: The losses.
            keys: Key paths of the settings, for messages.
            student: Transformers config of the student.
            teacher: Transformers config of the teacher.
            part: Whether the student is a pruned copy of the teacher.
            context: Data and task.

        Raises:
            InputError: They do not fit, or a setting of a loss is invalid.
        """
        self._stage(settings, keys, part).check(student, teacher, context)

    def objective(self, distillation: Distillation, context: Context) -> nn.Module:
        """Returns the training objective, which holds the teacher.

        Args:
            distillation: Student, teacher and the losses between them.
            context: Data, seed, progress; `scratch` is the folder of the training.

        Raises:
            InputError: A loss does not fit the models.
        """
        assert context.teacher is not None, "the pipeline provides the teacher"
        stage = self._stage(distillation.settings, distillation.keys, distillation.origin is not None)
        stage = stage.model_copy(update={"teacher": context.teacher.id})  # for error messages
        steps, split = Steps(stage, distillation.source, context, distillation.origin), context.data.train
        teachers, prepared = [freeze(distillation.teacher)], distillation.prepared
        return steps.objective(distillation.model, teachers, prepared, [distillation.theirs], split, len(split))

    def _stage(self, settings: DistillationSettings, keys: SettingKeys, part: bool) -> _InjectedStage:
        given = {"loss": settings.loss, "losses": settings.losses, "temperature": settings.temperature, "hard_weight": settings.hard_weight}
        own = {
            "id": keys.stage,
            "settings_key": keys.key,
            "key_of_teacher": keys.teacher_key,
            "student_is_pruned_teacher": part,
            "micro_batch_size": getattr(settings, "micro_batch_size", None),
        }
        try:
            return _InjectedStage.model_validate({**given, **own})
        except ValidationError as error:
            raise InputError(*explain(error, _InjectedStage, keys.key)) from error
