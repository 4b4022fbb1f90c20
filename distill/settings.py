"""The settings of the stage `distill`: its recipe keys, their validation, and values derived from them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from distill.choices import Student
from distill.labeller.settings import Labeller
from distill.on_policy import OnPolicy
from distill.plain_text import PlainText
from distill.sequences import Sequences
from foundation.stage.stage import ModelStage, teachers_named
from foundation.training.distillation.masking import Augment
from foundation.training.distillation.schedules import Ramp, always_zero, smallest
from foundation.training.few_parameters.prefix_tuning import PrefixTuning
from foundation.training.few_parameters.prompt_tuning import PromptTuning
from foundation.training.losses.distillation.presets import AnyLoss, PresetName
from foundation.training.settings import LearningRate, TrainingSettings

if TYPE_CHECKING:
    from foundation.training.distillation.plan import LossPlan
    from foundation.training.losses.distillation.presets import Preset

TeacherName = Annotated[str, Field(min_length=1)]


def _kind(value: Any) -> str:
    """Returns which of the forms of `teacher` is meant, so that a message is about this one alone."""
    if isinstance(value, dict | Labeller):
        return "Labeller"
    return "list" if isinstance(value, list | tuple) else "str"


AnyTeacher = Annotated[
    Annotated[TeacherName, Tag("str")]
    | Annotated[tuple[TeacherName, ...], Field(min_length=1), Tag("list")]
    | Annotated[Labeller, Tag("Labeller")],
    Discriminator(_kind),
]


class DistillSettings(TrainingSettings, ModelStage):
    """Trains a smaller model to reproduce the predictions of a teacher."""

    NAME: ClassVar[str] = "distill"
    LATER: ClassVar[tuple[str, ...]] = ("prompt", "prefix", *TrainingSettings.LATER)

    student: Student = Student()
    """The model to train."""
    loss: PresetName | None = None
    """A published combination of losses; soft_target if neither this nor `losses` is given. hard_target trains only on the labels, as a
    baseline."""
    losses: tuple[AnyLoss, ...] = ()
    """A list of individual losses, instead of `loss`."""
    temperature: Annotated[float, Field(gt=0, le=100)] | Ramp | None = None
    """Softens the logits of both models; absent: the published value with `loss`, 2 with `losses`. {start, end} changes it linearly over
    the training."""
    hard_weight: Annotated[float, Field(ge=0)] | Ramp | None = None
    """Weight of the loss against the labels; absent: the published value with `loss`, 0 with `losses` or a labeller."""
    teacher: AnyTeacher = "baseline"
    """The teacher: baseline, input (the incoming model), the id of an earlier stage, or the Hub id or folder of another model. A list
    averages the temperature-softened probabilities of several teachers; it works with losses that use only logits. A map is a large
    language model that labels the rows; labels of the data are then not learned unless `hard_weight` is given."""
    teacher_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Weight of each teacher in the average; absent: equal weights."""
    sequences: Sequences | None = None
    """Sequence-level distillation for tasks whose answers are tokens: the teacher's answers replace the targets of the train split."""
    on_policy: OnPolicy | None = None
    """On-policy distillation for tasks whose answers are tokens: some steps train on answers that the student generates itself."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the train rows, or of the corpus, to train on, chosen by content hash."""
    extra_text: PlainText | None = None
    """Unlabelled text to train on besides the train rows. Used by every loss except the hard-target loss; rows of the evaluation and
    selection splits are excluded."""
    augment: Augment | None = None
    """Adds copies of the text rows with some tokens masked, anew in every epoch. Used by every loss except the hard-target loss."""
    corpus: PlainText | None = None
    """Plain text to train on instead of the train rows (task-agnostic distillation). Losses on logits are dropped from `loss`, the head is
    not trained, the last weights are kept, and the teacher may be a pretrained model without a head for the task."""
    pack: bool = True
    """With `corpus`: joins short lines and splits long ones into rows of about `data.max_length` tokens; false: each line is a row."""
    learning_rate: LearningRate = 1e-4
    """Peak learning rate."""
    prompt: PromptTuning | None = None
    """Prompt tuning or P-tuning, as in `finetune`: trains virtual tokens before every text, and the head, instead of all weights. With
    losses on logits. After `prune` it is a recovery that leaves the weights as they are."""
    prefix: PrefixTuning | None = None
    """Prefix tuning or P-tuning v2, as in `finetune`: trains keys and values before those of every layer's attention, and the head. With
    losses that do not read attention."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.loss is not None and self.losses:
            raise ValueError("give either loss (a published combination) or losses (a list), not both")
        if self.temperature is not None and smallest(self.temperature) <= 0:
            raise ValueError("temperature: must be above 0 at both ends")
        if self.hard_weight is not None and smallest(self.hard_weight) < 0:
            raise ValueError("hard_weight: must be at least 0 at both ends")
        if isinstance(self.hard_weight, Ramp) and always_zero(self.hard_weight):
            raise ValueError("hard_weight: 0 given at both ends; give 0 to train without labels")
        if self.teacher_weights and len(self.teacher_weights) != len(teachers_named(self)):
            raise ValueError(
                f"teacher_weights: {len(self.teacher_weights)} given for {len(teachers_named(self))} teachers; give one for each"
            )
        unlabelled = [name for name in ("extra_text", "augment") if getattr(self, name) is not None]
        if self.loss == "hard_target" and unlabelled:
            raise ValueError(f"{unlabelled[0]}: loss: hard_target learns from labels alone, these rows have none; remove {unlabelled[0]}")
        if self.on_policy is not None and not self.resolved().losses:
            raise ValueError("on_policy: loss: hard_target learns from labels alone, which answers of the student lack; remove on_policy")
        if self.corpus is not None and (self.extra_text is not None or self.hard_weight):
            raise ValueError("corpus: replaces the train rows and has no labels; remove hard_weight and extra_text")
        if self.labeller is not None:
            given = [name for name in ("sequences", "on_policy", "augment", "corpus") if getattr(self, name) is not None]
            given += ["teacher_weights"] * bool(self.teacher_weights) + ["loss: hard_target"] * (self.loss == "hard_target")
            if given:
                raise ValueError(f"{given[0]}: given with a labeller, which labels rows once and has no hidden states; leave it out")
        for few in ("prompt", "prefix"):
            others = ("prefix",) * (few == "prompt") + ("lora", "sequences", "on_policy", "augment", "corpus")
            given = [name for name in others if getattr(self, name) is not None]
            if getattr(self, few) is not None and given:
                raise ValueError(f"{few}: given with {given[0]}; leave one of them out")
        return self

    @property
    def labeller(self) -> Labeller | None:
        """The language model that labels the rows; None where teachers are models of the task."""
        return self.teacher if isinstance(self.teacher, Labeller) else None

    @property
    def teacher_key(self) -> str:
        """Key path of its teacher."""
        return f"{self.key}.teacher"

    @property
    def teacher_head(self) -> Literal["keep", "new"]:
        """Whether an external teacher must bring a head for the task ("keep") or may lack one ("new")."""
        return "keep" if self.corpus is None else "new"

    @property
    def plan(self) -> LossPlan:
        """The losses, with every default filled in."""
        from foundation.training.distillation.plan import LossPlan

        name = None if self.losses else self.loss or "soft_target"
        return LossPlan(self.resolved(), name, self.title, self.key, self.teacher_key)

    def resolved(self) -> Preset:
        """Returns the losses, weights and temperature with every default filled in."""
        from foundation.training.losses.distillation.presets import Preset, preset_of

        if self.corpus is None:
            hard_weight = 0.0 if self.labeller is not None and self.hard_weight is None else self.hard_weight
            return preset_of(self.loss, self.losses, hard_weight, self.temperature)
        losses = tuple(loss for loss in preset_of(self.loss, self.losses).losses if not loss.COMPARES_ANSWERS)
        return Preset(losses if self.losses else tuple(loss.model_copy(update={"steps": (0.0, 1.0)}) for loss in losses), 0.0)
