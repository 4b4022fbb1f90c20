"""The losses of one training against a teacher, with every default filled in, and their checks before the first stage of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foundation.core.errors import InputError
from foundation.labels.tasks import tasks_with
from foundation.training.losses.distillation.loss import Setting, Shape, check_compared, check_processes, check_stacks
from foundation.training.losses.distillation.presets import Preset

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from foundation.stage.context import Context


@dataclass(frozen=True)
class LossPlan:
    """The losses of a distillation, and their keys in the recipe."""

    preset: Preset
    """The losses, the weight of the labels and the temperature."""
    name: str | None
    """The published combination; None where the recipe lists the losses."""
    stage: str
    """Id of the stage."""
    key: str
    """Key path of the settings, for messages."""
    teacher_key: str
    """Key path of the teacher, for messages."""
    student_is_part: bool = False
    """Whether the student is a pruned copy of the teacher. Only the matching parts of the teacher are then captured
    (`foundation.models.architecture.origin`), so that each layer, channel and head learns from its original; layers of the teacher are
    counted among these."""

    def settings(self, student: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> list[Setting]:
        """Returns the setting of each loss, from the Transformers configs of both models."""
        ours = Shape.of(student)
        shapes = ours, ours if self.student_is_part else Shape.of(teacher)
        keys = ["loss" if self.name else f"losses[{number}]" for number in range(len(self.preset.losses))]
        return [Setting(*shapes, context.task, f"{self.key}.{key}", self.student_is_part, context.team) for key in keys]

    def check(self, student: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context, parts: int | None) -> None:
        """Checks before the first stage runs that the losses fit both models and the task.

        Args:
            student: Transformers config of the student.
            teacher: Transformers config of the first teacher.
            context: Data, task and processes.
            parts: Rows of a micro-batch; None if all rows of a batch can be compared.

        Raises:
            InputError: They do not fit.
        """
        from foundation.training.distillation.objective import check_covered
        from foundation.training.supervised import check_loss

        preset, facts = self.preset, context.facts
        self.check_answers(context)
        hard_weight = preset.hard_weight if context.data.train.labels.KNOWN else 0.0
        if hard_weight != 0:
            check_loss(student, context, self.key, parts)
        check_covered(preset.losses, hard_weight, f"{self.key}.losses")
        for loss, setting in zip(preset.losses, self.settings(student, teacher, context), strict=True):
            loss.wants(setting)
            if loss.VECTORS_ALONE and not facts.embeds:
                tasks = tasks_with(lambda row: row.embeds)
                raise InputError(setting.key, f"{loss.name} given for {context.task}", f"it is for {tasks}", "give another loss")
            check_stacks(loss, loss.name, setting)
            check_compared(loss, loss.name, setting, context.data.train.labels)
            if loss.ACROSS_ROWS and parts is not None:
                raise InputError(
                    setting.key, f"{loss.name} compares the rows of a batch", remedy=f"remove micro_batch_size ({parts} given)"
                )
            check_processes(loss, setting, context.team)

    def check_answers(self, context: Context) -> None:
        """Checks that the losses support the answers of a task.

        Raises:
            InputError: A loss needs one answer for each row, or logits of classes.
        """
        facts, losses = context.facts, self.preset.losses
        if facts.answer.PER_TOKEN and (unfit := [loss.name for loss in losses if loss.ONE_ANSWER]):
            needs = f"{unfit[0]} needs one prediction per row, {context.task} has many"
            raise InputError(*self._named(unfit[0]), needs, "give soft_target")
        if facts.embeds and (unfit := [loss.name for loss in losses if loss.COMPARES_ANSWERS and not loss.TAKES_VECTORS]):
            remedy = "give soft_target, projected, similarity or margin_mse"
            compares = f"{unfit[0]} compares logits of classes, {context.task} has vectors"
            raise InputError(*self._named(unfit[0]), compares, remedy)

    def _named(self, loss: str) -> tuple[str, str]:
        """Returns the key that gives a loss, and what it gives."""
        return (f"{self.key}.loss", f"{self.name} given") if self.name else (f"{self.key}.losses", f"{loss} given")
