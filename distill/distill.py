"""Knowledge distillation: a student learns from a teacher's answers and from what goes on inside of it.

    loss_b = hard_weight * hard_b(labels) + sum_i weight_i * loss_i,b(student, teacher)

`loss` names a published combination, `losses` lists them one by one; each is a file of this folder. The student comes from the
incoming model (`distill.student`), the teacher is the baseline unless another is named. The weights kept are the best on the selection
split: by the labels where this run trained the baseline itself, else by agreement with the teacher, as a baseline from outside may
have been trained on those rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from compress.artifact import Artifact
from compress.errors import InputError
from compress.finetune import judged_by, selection_metric, trained_here
from compress.stage import Context, Stage, is_model
from compress.tasks import TASKS, num_classes
from distill.distilbert import Cosine
from distill.hidden import Hidden
from distill.logit_standardization import LogitStandardization
from distill.loss import Loss, Setting, Shape
from distill.minilm import MiniLM, MiniLMv2
from distill.mixkd import MixKD
from distill.relational import Relational
from distill.schedules import Ramp, smallest
from distill.soft_target import SoftTarget
from distill.student import Student
from distill.tinybert import TinyBert

if TYPE_CHECKING:
    from torch import nn

    from compress.data import Data
    from compress.preprocess import Preprocessor
    from compress.splits import Split
    from distill.objective import Objective

AnyLoss = Annotated[
    SoftTarget | Cosine | Hidden | TinyBert | MiniLM | MiniLMv2 | MixKD | LogitStandardization | Relational, Field(discriminator="name")
]


@dataclass(frozen=True)
class Preset:
    """A published combination."""

    losses: tuple[Loss, ...]
    hard_weight: float | Ramp
    temperature: float | Ramp = 2.0


PresetName = Literal["soft_target", "distilbert", "minilm", "minilmv2", "pkd", "tinybert", "mixkd", "logit_standardization", "relational"]
PRESETS: Mapping[PresetName, Preset] = {
    "soft_target": Preset((SoftTarget(),), 0.5),
    "distilbert": Preset((SoftTarget(weight=5.0), Cosine()), 2.0),
    "minilm": Preset((SoftTarget(), MiniLM()), 0.0),
    "minilmv2": Preset((SoftTarget(), MiniLMv2()), 0.0),
    "pkd": Preset((SoftTarget(weight=0.5), Hidden(layers="skip", tokens="first", normalize=True)), 0.5, 5.0),
    "tinybert": Preset((TinyBert(steps=(0.0, 0.75)), SoftTarget(steps=(0.75, 1.0))), 0.0, 1.0),
    "mixkd": Preset((SoftTarget(), MixKD()), 1.0),
    "logit_standardization": Preset((LogitStandardization(weight=9.0),), 0.1),
    "relational": Preset((SoftTarget(), Relational()), 0.5),
}


class Distill(Stage):
    """Trains a smaller model to answer as its teacher does."""

    NAME: ClassVar[str] = "distill"

    student: Student = Student()
    """The model to train."""
    loss: PresetName | None = None
    """A published combination of losses; soft_target where neither it nor `losses` is given."""
    losses: tuple[AnyLoss, ...] = ()
    """The losses one by one, instead of `loss`."""
    temperature: Annotated[float, Field(gt=0, le=100)] | Ramp | None = None
    """Softens the answers of both models; absent: as published with `loss`, 2 with `losses`. {start, end} changes it over the training."""
    hard_weight: Annotated[float, Field(ge=0)] | Ramp | None = None
    """Weight of the labels; absent: as published with `loss`, 0 with `losses`."""
    teacher: Annotated[str, Field(min_length=1)] = "baseline"
    """Who teaches: baseline, input (the incoming model), the id of an earlier stage, or the Hub id or folder of another model."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the train rows that is learned from, chosen by hash of their content."""
    epochs: Annotated[float, Field(gt=0, le=1000)] = 3
    """Passes over those rows; 0.5 is half a pass."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-4
    """Peak learning rate."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 32
    """Rows per step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows in memory at once, where a whole batch does not fit; the result does not depend on it, up to rounding and dropout."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the steps over which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls to 0 after the warm-up; constant: not at all."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""
    evaluate_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between two looks at the selection split; absent: once an epoch."""
    keep: Literal["best", "last"] = "best"
    """Weights that are kept: the best on the selection split, or the last."""

    @model_validator(mode="after")
    def _consistent(self) -> Distill:
        if self.loss is not None and self.losses:
            raise ValueError("give either loss (a published combination) or losses (a list), not both")
        if self.temperature is not None and smallest(self.temperature) <= 0:
            raise ValueError("temperature: above 0 at both ends")
        if self.hard_weight is not None and smallest(self.hard_weight) < 0:
            raise ValueError("hard_weight: at least 0 at both ends")
        return self

    @property
    def key(self) -> str:
        """Key path of this stage in the recipe."""
        return f"stages.{self.id or self.NAME}"

    def depends(self, context: Context) -> Any:
        """The contents of another checkpoint that is the student."""
        from compress.model import ModelConfig, source_digest

        if self.student.path is None:
            return None
        return {"student": source_digest(ModelConfig(path=self.student.path, task=context.task, head=self.student.head))}

    def work(self, macs: int, data: Data) -> float:
        """Forward and twice as much backward for every row of every epoch, one forward of the teacher, and the selection split."""
        return macs * (self.epochs * (3.0 * self.fraction * len(data.train) + len(data.selection)) + self.fraction * len(data.train))

    def config_after(self, config: Any) -> Any:
        """The config of the student."""
        from distill.student import student_config

        return student_config(self.student, config, f"{self.key}.student")

    def resolved(self) -> Preset:
        """Returns the losses and their settings with every default filled in."""
        preset = Preset(self.losses, 0.0) if self.losses else PRESETS[self.loss or "soft_target"]
        return Preset(
            preset.losses,
            preset.hard_weight if self.hard_weight is None else self.hard_weight,
            preset.temperature if self.temperature is None else self.temperature,
        )

    def check(self, config: Any, teacher: Any, context: Context) -> None:
        """Finds out before the first stage runs whether student, teacher and losses fit each other and the task.

        Raises:
            InputError: They do not.
        """
        from compress.model_config import check_length
        from distill.objective import check_covered
        from distill.student import check_student

        if TASKS[context.task].answer == "tokens":
            self._check_tokens(self.resolved())
        num_labels = num_classes(context.task, context.data.labels)
        check_student(self.student, context.task, num_labels, f"{self.key}.student")
        after = self.config_after(config)
        if TASKS[context.task].modality == "text":
            check_length(after, context.max_length)
        preset = self.resolved()
        check_covered(preset.losses, preset.hard_weight, f"{self.key}.losses")
        for loss, setting in zip(preset.losses, self._settings(after, teacher, context), strict=True):
            loss.wants(setting)
            if loss.ACROSS_ROWS and self.micro_batch_size is not None:
                raise InputError(f"{setting.key}: compares the rows of a batch; leave micro_batch_size ({self.micro_batch_size} given) out")

    def _check_tokens(self, preset: Preset) -> None:
        """Raises where a model that answers token by token cannot be distilled in this way."""
        if self.student.path is not None:
            raise InputError(f"{self.key}.student.path: {self.student.path} given; text-generation keeps the tokens of the incoming model")
        other = [loss.name for loss in preset.losses if isinstance(loss, MixKD | LogitStandardization | Relational)]
        if other:
            where = f"loss: {self.loss}" if self.loss else f"losses: {other[0]}"
            raise InputError(f"{self.key}.{where} given; {other[0]} compares one answer a row, text-generation has many: give soft_target")

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes the student as a checkpoint.

        Returns:
            `losses` per epoch, `selection` (metric, values, best step), `steps`, `seconds_per_step`, `autocast`, `rows`, `teacher`,
            `teacher_logits` (cached or live).

        Raises:
            InputError: Student, teacher or losses do not fit each other, or the loss became NaN or infinite.
        """
        from compress.data import preprocessor
        from compress.evaluate import PRIMARY
        from compress.model import load, save
        from compress.train import TrainConfig, autocast_dtype, train, training_device
        from distill.student import build
        from distill.teacher import freeze

        assert context.teacher is not None, "the pipeline hands over the teacher"
        device = training_device()
        student, source = build(self.student, parent.path, context, f"{self.key}.student")
        student.to(device)
        folder = self._teacher_folder(context.teacher, context)
        teacher = freeze(load(folder, device))
        prepared = preprocessor(source, context.task, context.max_length, context.target)
        theirs = preprocessor(folder, context.task, context.max_length, context.target)
        split = chosen_rows(context.data.train, self.fraction)
        objective = self._objective(student, teacher, prepared, theirs, split, context)
        outside = not trained_here(context) and TASKS[context.task].answer != "tokens"  # text is its own label
        config = TrainConfig.of(self)
        history = train(
            student,
            objective.to(device),
            split.rows,
            split.labels,
            prepared,
            config,
            context.seed,
            context.scratch,
            context.progress,
            selection_metric(judged_by(context, teacher, theirs) if outside else context, prepared),
            label=self.id or self.NAME,
            depends={"stage": self.model_dump(mode="json"), "teacher": context.teacher.digest},
            higher_is_better=TASKS[context.task].higher_is_better,
        )
        save(
            student.cpu(),
            source,
            out,
            f"Distilled for {history.steps} steps of {self.batch_size} rows, peak learning rate {self.learning_rate:g}",
        )
        metric = PRIMARY[context.task] + (" against the teacher" if outside else "")
        return {
            "losses": history.losses,
            "selection": {"metric": metric, "values": history.selection, "best_step": history.best_step},
            "steps": history.steps,
            "seconds_per_step": history.seconds / max(1, history.steps),
            "autocast": str(autocast_dtype(device)).removeprefix("torch."),
            "rows": len(split),
            "teacher": context.teacher.id,
            "teacher_logits": "live" if objective.pair.teacher.logits is None else "cached",
        }

    def _settings(self, student: Any, teacher: Any, context: Context) -> list[Setting]:
        """Returns what each loss is used in."""
        shapes = Shape.of(student), Shape.of(teacher)
        names = [f"losses[{i}]" for i in range(len(self.losses))] or ["loss"] * len(self.resolved().losses)
        return [Setting(*shapes, context.task, f"{self.key}.{name}") for name in names]

    def _teacher_folder(self, teacher: Artifact, context: Context) -> Path:
        """Returns the teacher's checkpoint; one from outside is imported as the recipe's own model is."""
        from compress.model import ModelConfig, import_model
        from distill.teacher import about

        if not is_model(self.teacher):
            return teacher.path
        folder = context.scratch / "teacher"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with about(f"{self.key}.teacher"):
            import_model(ModelConfig(path=str(teacher.path), task=context.task), context.data.labels, context.seed, folder)
        return folder

    def _objective(
        self, student: nn.Module, teacher: nn.Module, prepared: Preprocessor, theirs: Preprocessor, split: Split, context: Context
    ) -> Objective:
        """Puts the losses together, and computes the teacher's answers beforehand where they are all that is needed of it."""
        from compress.training_rows import Rows
        from distill.capture import Capture, Wanted
        from distill.objective import Objective
        from distill.teacher import CACHE_BYTES, Pair, Teacher, cached_logits, takes_the_same

        preset = self.resolved()
        settings = self._settings(student.config, teacher.config, context)
        rows = Rows.prepare(split.rows, prepared)
        same_tokens, same_inputs = takes_the_same(prepared, theirs, split.rows)
        teacher_rows = rows if same_inputs else Rows.prepare(split.rows, theirs)
        asked = Teacher(Capture(teacher, self.key), teacher_rows, same_inputs)
        generates = TASKS[context.task].answer == "tokens"
        if not same_tokens and generates:
            raise InputError(f"{self.key}.teacher: {self.teacher} has another vocabulary than the student; give one with the same tokens")
        if not same_tokens and not all(loss.ANSWERS_ONLY for loss in preset.losses):
            raise InputError(
                f"{self.key}.teacher: {self.teacher} splits the rows into other tokens than the student; losses that look inside of it do "
                "not fit: give loss: soft_target"
            )
        pair = Pair(Capture(student, self.key), asked, rows, split.labels, context.seed)
        objective = Objective(preset.losses, settings, pair, preset.temperature, preset.hard_weight, context.seed)
        only_logits = all(teacher_wanted == Wanted(logits=True) for _, teacher_wanted in objective.wanted)
        if only_logits and not generates and 4 * len(split) * settings[0].teacher.classes <= CACHE_BYTES:
            assert context.teacher is not None
            identity = {"teacher": context.teacher.digest, "rows": split.digest, "max_length": context.max_length}
            asked.logits = cached_logits(teacher, teacher_rows, identity, context.scratch, context.progress, self.id or self.NAME)
        return objective


def chosen_rows(train: Split, fraction: float) -> Split:
    """Returns about that share of the train rows, chosen by hash of their content: the same for every order, seed and machine."""
    from compress.splits import hold_out

    return train if fraction == 1 else hold_out(train, fraction)[1]
