"""What a recipe says of the stage `distill`: its typed keys, and what follows from them alone."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.stage.context import Context
from compress.stage.stage import ModelStage, teachers_named
from distill.losses.loss import Setting, Shape
from distill.masking import Augment
from distill.plain_text import PlainText
from distill.presets import PRESETS, AnyLoss, Preset, PresetName
from distill.schedules import Ramp, always_zero, smallest
from distill.student import Student

TeacherName = Annotated[str, Field(min_length=1)]


class DistillSettings(ModelStage):
    """Trains a smaller model to answer as its teacher does."""

    NAME: ClassVar[str] = "distill"

    student: Student = Student()
    """The model to train."""
    loss: PresetName | None = None
    """A published combination of losses; soft_target where neither it nor `losses` is given. hard_target: the labels alone, to compare
    with."""
    losses: tuple[AnyLoss, ...] = ()
    """The losses one by one, instead of `loss`."""
    temperature: Annotated[float, Field(gt=0, le=100)] | Ramp | None = None
    """Softens the answers of both models; absent: as published with `loss`, 2 with `losses`. {start, end} changes it over the training."""
    hard_weight: Annotated[float, Field(ge=0)] | Ramp | None = None
    """Weight of the labels; absent: as published with `loss`, 0 with `losses`."""
    teacher: TeacherName | Annotated[tuple[TeacherName, ...], Field(min_length=1)] = "baseline"
    """Who teaches: baseline, input (the incoming model), the id of an earlier stage, or the Hub id or folder of another model. A list:
    the mean of their answers, softened by the temperature, for losses that compare answers alone."""
    teacher_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """With a list of teachers the weight of each in the mean; absent: equal ones."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the train rows (of the corpus, where there is one) that is learned from, chosen by hash of their content."""
    extra_text: PlainText | None = None
    """Unlabelled text to learn from beside these rows: for every loss but that of the labels, and without evaluation and selection rows."""
    augment: Augment | None = None
    """Copies of text rows with some tokens masked, in every epoch: for every loss but that of the labels."""
    corpus: PlainText | None = None
    """Plain text to learn the inside of the teacher on, instead of the train rows: losses that compare answers are left out of `loss`,
    the head stays as it is, the last weights are kept, and the teacher may be any model of the kind, trained for the task or not."""
    pack: bool = True
    """With `corpus`: short lines are joined and long ones cut, so that rows have about `data.max_length` tokens; false: a line is a row."""
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
    def _consistent(self) -> Self:
        if self.loss is not None and self.losses:
            raise ValueError("give either loss (a published combination) or losses (a list), not both")
        if self.temperature is not None and smallest(self.temperature) <= 0:
            raise ValueError("temperature: above 0 at both ends")
        if self.hard_weight is not None and smallest(self.hard_weight) < 0:
            raise ValueError("hard_weight: at least 0 at both ends")
        if isinstance(self.hard_weight, Ramp) and always_zero(self.hard_weight):
            raise ValueError("hard_weight: 0 given at both ends; give 0 to leave the labels out")
        if self.teacher_weights and len(self.teacher_weights) != len(teachers_named(self)):
            raise ValueError(
                f"teacher_weights: {len(self.teacher_weights)} given for {len(teachers_named(self))} teachers; give one for each"
            )
        unlabelled = [name for name in ("extra_text", "augment") if getattr(self, name) is not None]
        if self.loss == "hard_target" and unlabelled:
            raise ValueError(f"{unlabelled[0]}: rows without labels teach nothing where labels alone do (loss: hard_target); leave it out")
        if self.corpus is not None and (self.extra_text is not None or self.hard_weight):
            raise ValueError("corpus: plain text has no labels and stands alone; give neither hard_weight nor extra_text beside it")
        return self

    @property
    def key(self) -> str:
        """Key path of this stage in the recipe."""
        return f"stages.{self.id or self.NAME}"

    @property
    def teacher_key(self) -> str:
        """That of its teacher."""
        return f"{self.key}.teacher"

    @property
    def part(self) -> bool:
        """Whether the student is made of parts of the teacher, of which then only those are seen (`distill.injected`)."""
        return False

    @property
    def teacher_head(self) -> Literal["keep", "new"]:
        """Whether the head of a teacher from outside is the one for the task, or may be missing."""
        return "keep" if self.corpus is None else "new"

    def resolved(self) -> Preset:
        """Returns the losses and their settings with every default filled in."""
        preset = Preset(self.losses, 0.0) if self.losses else PRESETS[self.loss or "soft_target"]
        if self.corpus is not None:
            inside = tuple(loss for loss in preset.losses if not loss.COMPARES_ANSWERS)
            return Preset(inside if self.losses else tuple(loss.model_copy(update={"steps": (0.0, 1.0)}) for loss in inside), 0.0)
        return Preset(
            preset.losses,
            preset.hard_weight if self.hard_weight is None else self.hard_weight,
            preset.temperature if self.temperature is None else self.temperature,
        )

    def settings(self, student: Any, teacher: Any, context: Context) -> list[Setting]:
        """Returns what each loss is used in."""
        ours = Shape.of(student)
        shapes = ours, ours if self.part else Shape.of(teacher)
        names = [f"losses[{i}]" for i in range(len(self.losses))] or ["loss"] * len(
            self.resolved().losses
        )  # a corpus refuses any of `losses`
        return [Setting(*shapes, context.task, f"{self.key}.{name}", self.part) for name in names]
