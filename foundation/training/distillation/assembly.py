"""Assembles the objective of a training against teachers, and caches their logits if the losses need nothing else of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.data.splits import Split
from foundation.models.architecture.origin import Origin
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor
from foundation.training.distillation.capture import Capture, Wanted
from foundation.training.distillation.ensemble import shares
from foundation.training.distillation.masking import Masking
from foundation.training.distillation.objective import Objective
from foundation.training.distillation.plan import LossPlan
from foundation.training.distillation.teacher import CACHE_BYTES, Pair, Targets, Teacher, match_inputs
from foundation.training.losses.distillation.loss import Shape
from foundation.training.rows import Rows
from foundation.training.teacher_logits import teacher_logits
from foundation.training.train import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class StudentInputs:
    """The training rows, and how the student reads them; teachers with the same preprocessing share its inputs."""

    split: Split
    preprocessor: Preprocessor
    num_labelled: int
    """How many of the rows are labelled: these come first."""
    masking: Masking | None = None
    """Masks tokens of masked copies."""
    on_policy: Callable[[nn.Module, Batch], Batch | None] | None = None
    """Lets the student write the answers of some steps."""

    @classmethod
    def of(cls, split: Split, preprocessor: Preprocessor) -> StudentInputs:
        """Returns the rows of a split, all of which are labelled if its labels are known."""
        return cls(split, preprocessor, count_labelled(split))


def count_labelled(split: Split) -> int:
    """Returns the number of rows that have labels: all, or none."""
    return len(split) if split.labels.KNOWN else 0


class Loaded(NamedTuple):
    """A teacher: a frozen model on its device."""

    name: str
    """Its name in the recipe, for messages."""
    model: nn.Module
    preprocessor: Preprocessor


def assembled(
    plan: LossPlan,
    student: nn.Module,
    teachers: Sequence[Loaded],
    inputs: StudentInputs,
    context: Context,
    origin: Origin | None = None,
    weights: Sequence[float] = (),
) -> Objective:
    """Returns the objective; computes and caches the teachers' logits if the losses need nothing else of them.

    Args:
        plan: The losses.
        student: The model to train.
        teachers: One teacher; several if the losses need only logits.
        inputs: The training rows.
        context: Task, seed, processes and the artifacts of the teachers; `scratch` is the folder of the training.
        origin: Which parts of the teacher the student kept, if it is a pruned copy of it.
        weights: Weight of each teacher; empty: equal weights.

    Raises:
        InputError: A loss does not fit the models.
    """
    split, rows = inputs.split, Rows.prepare(inputs.split.rows, inputs.preprocessor)
    adapted = tuple(_teacher(plan, teacher, inputs, rows, origin) for teacher in teachers)
    pair = Pair(
        student=Capture(student, plan.key),
        teachers=adapted,
        rows=rows,
        labels=split.labels,
        seed=context.seed,
        num_labelled=None if inputs.num_labelled == len(split) else inputs.num_labelled,
        weights=shares(weights, len(teachers)),
        masking=inputs.masking,
        on_policy=inputs.on_policy,
    )
    config, preset = student.config, plan.preset
    settings = plan.settings(config, teachers[0].model.config, context)
    objective = Objective(preset.losses, settings, pair, preset.temperature, preset.hard_weight, context.seed, context.task, context.team)
    if _can_cache_logits(objective, config, len(split), context):
        for teacher, artifact in zip(adapted, context.teachers, strict=True):
            identity = {"teacher": artifact.digest, "rows": split.digest, "max_length": context.max_length}
            teacher.logits = teacher_logits(teacher.capture.model, teacher.rows, identity, context, plan.stage)
    return objective


def with_targets(plan: LossPlan, student: nn.Module, targets: Tensor, inputs: StudentInputs, context: Context) -> Objective:
    """Returns the objective with soft targets in place of a teacher.

    Args:
        plan: The losses; they need only logits.
        student: The model to train.
        targets: Log-probabilities of the classes for all training rows, float32 `[n, C]`.
        inputs: The training rows.
        context: Task, seed and processes.
    """
    pair = Pair(
        student=Capture(student, plan.key),
        teachers=(Targets(targets),),
        rows=Rows.prepare(inputs.split.rows, inputs.preprocessor),
        labels=inputs.split.labels,
        seed=context.seed,
        num_labelled=None if inputs.num_labelled == len(inputs.split) else inputs.num_labelled,
    )
    preset = plan.preset
    settings = plan.settings(student.config, student.config, context)
    return Objective(preset.losses, settings, pair, preset.temperature, preset.hard_weight, context.seed, context.task, context.team)


def _teacher(plan: LossPlan, teacher: Loaded, inputs: StudentInputs, rows: Rows, origin: Origin | None) -> Teacher:
    """Returns a teacher with the training rows as its inputs.

    Raises:
        InputError: The teacher gets other tokens than the student, and a loss or the masking needs the same.
    """
    key, name = plan.teacher_key, teacher.name
    match = match_inputs(inputs.preprocessor, teacher.preprocessor, inputs.split.rows)
    if not match.tokens and inputs.preprocessor.per_token:
        raise InputError(key, f"{name} has another vocabulary than the student", remedy="give a teacher with the same tokens")
    if not match.tokens and not all(loss.ANSWERS_ONLY for loss in plan.preset.losses):
        raise InputError(
            key,
            f"{name} tokenizes the rows differently than the student",
            "losses on hidden states or attention need equal tokens",
            "give loss: soft_target",
        )
    if not match.ids and inputs.masking is not None:
        raise InputError(f"{plan.key}.augment", f"given, but {name} has other token ids than the student", remedy="remove augment")
    if inputs.on_policy is not None and not match.inputs:
        raise InputError(f"{plan.key}.on_policy", f"given, but {name} takes other inputs than the student", remedy="remove on_policy")
    own = rows if match.inputs else Rows.prepare(inputs.split.rows, teacher.preprocessor)
    return Teacher(Capture(teacher.model, key), own, match.inputs, masking=inputs.masking, origin=origin)


def _can_cache_logits(objective: Objective, config: PreTrainedConfig, num_rows: int, context: Context) -> bool:
    """Whether the losses need only the teachers' logits, for fixed rows, and these fit into the cache."""
    wanted = [from_teacher for _, from_teacher in objective.wanted]
    only_logits = Wanted(logits=True) in wanted and not any(from_teacher.internals for from_teacher in wanted)
    fits = not context.facts.answer.PER_TOKEN and 4 * num_rows * Shape.of(config).classes * len(objective.pair.teachers) <= CACHE_BYTES
    return only_logits and fits and objective.pair.masking is None
