"""The base class of distillation losses: a weight, the steps in which the loss is active, and named loss terms for every row.

A loss is a config with three methods. `wants` declares what to capture in student and teacher, `build` creates modules that are trained
along with the student (projections between widths), `parts` computes the loss of each row. The formulas are pure tensor functions in the
file of the loss. Unless a loss says otherwise, the loss of a row depends only on that row, however it is batched or padded, so splitting
a batch into micro-batches changes nothing. Means over tokens are taken per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from foundation.core.config import Config
from foundation.core.errors import InputError
from foundation.labels.facts import Facts
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.labels.text_groups import Groups
from foundation.machine.parallel import ALONE, Team
from foundation.models.heads.embedding import EMBEDDING_KEY, width_of
from foundation.models.library import depths_of
from foundation.models.own_shape import SHAPE_KEY, prefix_of
from foundation.training.distillation.schedules import Ramp, always_zero, smallest

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from foundation.training.distillation.capture import Captured, Wanted
    from foundation.training.distillation.teacher import Pair
    from foundation.training.train import Batch

LayerMap = Literal["uniform", "skip", "last"] | Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
"""The teacher layer for each student layer (`foundation.training.distillation.layer_maps`)."""
SearchedMap = LayerMap | Literal["searched"]


@dataclass(frozen=True)
class Shape:
    """The model dimensions that losses depend on; 0 if the model has no such dimension."""

    kind: str
    """Model type of Transformers."""
    layers: int
    hidden: int
    heads: int
    """Attention heads per layer; 0 if layers differ, for example after pruning."""
    classes: int
    """Logits of a row, or the numbers of its vector."""
    inner: int = 0
    """Total width of the heads of a layer, or the greatest common divisor if layers differ; 0 if it equals `hidden`."""
    causal: bool = False
    """Whether attention is causal, if only in a decoder: a token attends only to tokens before it."""
    decoder_layers: int = 0
    """Layers of an encoder-decoder's decoder, next to the `layers` of its encoder; 0 for a model with one stack of layers."""
    drops_tokens: bool = False
    """Whether tokens leave the model after some layer."""
    prefix: int = 0
    """Learned keys and values that every attention reads before its own."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Shape:
        """Reads the dimensions from a Transformers config."""
        layers, hidden, heads = (getattr(config, name, 0) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        own, head_dim = getattr(config, SHAPE_KEY, None), getattr(config, "head_dim", None)
        inner = heads * head_dim if head_dim else 0
        if own:
            inner = math.gcd(*(number * own["head_dim"] for number in own["heads"]))
            heads = own["heads"][0] if len(set(own["heads"])) == 1 else 0
        beside = (depths_of(config) or ())[1:]
        classes = width_of(config) if getattr(config, EMBEDDING_KEY, None) else config.num_labels
        causal, drops = is_causal(config) or bool(beside), bool(own and own.get("tokens"))
        return cls(config.model_type, layers, hidden, heads, classes, inner, causal, sum(beside), drops, prefix_of(config))

    @property
    def attention(self) -> int:
        """Total width of the heads of a layer."""
        return self.inner or self.hidden

    @property
    def depths(self) -> tuple[int, ...]:
        """Layers of each stack: of the encoder and the decoder, or of the only one."""
        return (self.layers, self.decoder_layers) if self.decoder_layers else (self.layers,)


@dataclass(frozen=True)
class Setting:
    """The setting of a loss: the two models, the task, and the recipe key."""

    student: Shape
    teacher: Shape
    task: Task
    key: str
    """Key path of the loss in the recipe, for messages."""
    student_is_part: bool = False
    """Whether the student is a pruned copy of the teacher. Only the matching part of the teacher is then captured, so that every student
    head has its counterpart."""
    team: Team = ALONE
    """The training processes, which share the rows of a batch."""

    @property
    def facts(self) -> Facts:
        """What sets the task apart."""
        return TASKS[self.task]

    @property
    def same_heads(self) -> bool:
        """Whether the heads of student and teacher can be compared one by one."""
        return self.student_is_part or (bool(self.student.heads) and self.student.heads == self.teacher.heads)

    @property
    def heads(self) -> str:
        """The number of heads of both models, for error messages."""
        ours, theirs = (str(shape.heads or "different numbers of") for shape in (self.student, self.teacher))
        return f"the student has {ours} heads, the teacher {theirs}"


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss: one batch, and the captured tensors of both models."""

    setting: Setting
    batch: Batch
    temperature: float
    student: Captured
    teacher: Captured
    pair: Pair
    """Both models, for a loss that runs them on inputs of its own."""


class Loss(Config):
    """Base class of all losses: when a loss is active, and its weight."""

    ANSWERS_ONLY: ClassVar[bool] = False
    """Whether the loss needs only logits, so that the teacher may have a different tokenizer."""
    COMPARES_ANSWERS: ClassVar[bool] = False
    """Whether the loss compares logits, of rows or of mixtures; it then needs task data, not a plain-text corpus."""
    VECTORS_ALONE: ClassVar[bool] = False
    """Whether the loss is for tasks whose answers are vectors."""
    TAKES_VECTORS: ClassVar[bool] = False
    """Whether a loss that compares answers can compare vectors, which are not logits of classes."""
    ONE_ANSWER: ClassVar[bool] = False
    """Whether the loss assumes one prediction or one vector per row; text-generation predicts at every token."""
    OWN_INPUTS: ClassVar[bool] = False
    """Whether the loss builds its own inputs from the models' embeddings; fsdp2 shards these, so it cannot be used with it."""
    ACROSS_ROWS: ClassVar[bool] = False
    """Whether the loss compares the rows of a batch with each other, so that micro-batches would change it. If it needs only vectors,
    the vectors of several micro-batches are compared (`foundation.training.grad_cache`)."""
    GATHERS: ClassVar[bool] = False
    """Whether a loss that compares rows gathers the rows of all processes; others need a single process."""
    NEEDS_NEGATIVES: ClassVar[bool] = False
    """Whether of vectors the loss compares an anchor with negatives, which the train rows have to give."""
    BY_STACK: ClassVar[bool] = False
    """Whether the loss compares encoder with encoder and decoder with decoder; others that look inside take one stack of layers."""

    weight: Annotated[float, Field(gt=0)] | Ramp = 1.0
    """Weight of the loss; {start, end} changes it linearly over the training."""
    steps: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]] = (0.0, 1.0)
    """Span of the training in which the loss is active, as fractions of all steps."""

    @model_validator(mode="after")
    def _in_order(self) -> Loss:
        if self.steps[0] >= self.steps[1]:
            raise ValueError(f"steps: {list(self.steps)} given; the first fraction must be below the second")
        if smallest(self.weight) < 0:
            raise ValueError("weight: must be at least 0 at both ends")
        if always_zero(self.weight):
            raise ValueError("weight: 0 given at both ends; give a value above 0 for one, or remove the loss")
        return self

    def counts(self, step: int, num_steps: int) -> bool:
        """Returns whether the loss is active in step `step` (from 0)."""
        return self.steps[0] * num_steps <= step < self.steps[1] * num_steps

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """Returns the places to capture in the student and in the teacher.

        Raises:
            InputError: The loss does not fit these two models.
        """
        raise NotImplementedError

    def build(self, setting: Setting) -> nn.Module | None:
        """Returns a module to train along with the student, or None."""
        return None

    def prepare(self, pair: Pair) -> None:
        """Checks what only the loaded models can show.

        Raises:
            InputError: The loss does not fit the models.
        """

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns the unweighted terms of the loss by name, float `[b]` each; `trained` is what `build` returned."""
        raise NotImplementedError


def is_causal(config: PreTrainedConfig) -> bool:
    """Returns whether a model's attention is causal: Transformers has a causal but no masked language model of its type, or its config says
    it is a decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = config.model_type
    next_alone = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return next_alone or bool(getattr(config, "is_decoder", False))


def check_stacks(loss: Loss, name: str, setting: Setting) -> None:
    """Checks that a loss fits the stacks of layers of both models.

    Raises:
        InputError: It looks inside an encoder-decoder but is for one stack of layers, or one of the models has another number of stacks.
    """
    stacks = len(setting.student.depths), len(setting.teacher.depths)
    if max(stacks) == 1 or not any(wanted.internals for wanted in loss.wants(setting)):
        return
    if not loss.BY_STACK:
        raise InputError(
            setting.key,
            f"{name} given",
            "it compares one stack of layers, an encoder-decoder has two",
            "give soft_target, or losses: [{name: hidden}]",
        )
    if stacks[0] != stacks[1]:
        raise InputError(setting.key, f"{name} given", "only one of student and teacher is an encoder-decoder", "give soft_target")


def check_compared(loss: Loss, name: str, setting: Setting, labels: Labels) -> None:
    """Checks that there is what a loss compares: all tokens in the layers of both models, and negatives in the train rows.

    Raises:
        InputError: It looks inside, and tokens leave one of the models on the way, or it compares attention that also reads a prefix; or
            rows of a task with vectors have no negatives.
    """
    if loss.NEEDS_NEGATIVES and setting.facts.embeds and not (isinstance(labels, Groups) and labels.count()):
        raise InputError(setting.key, f"{name} given", "the train rows have no negatives", "set data.columns.negative, or give similarity")
    sides = [side for side, shape in (("student", setting.student), ("teacher", setting.teacher)) if shape.drops_tokens]
    if sides and not loss.ANSWERS_ONLY:
        raise InputError(
            setting.key,
            f"{name} given",
            f"it compares layers token by token, and tokens leave the {sides[0]} on the way",
            "give soft_target",
        )
    models = zip(("student", "teacher"), (setting.student, setting.teacher), loss.wants(setting), strict=True)
    sides = [side for side, shape, wanted in models if shape.prefix and wanted.blocks]
    if sides:
        why = f"it compares attention from token to token, and the attention of the {sides[0]} reads a learned prefix too"
        raise InputError(setting.key, f"{name} given", why, "give soft_target, or losses: [{name: hidden}]")


def check_processes(loss: Any, setting: Setting, team: Team) -> None:
    """Checks that a loss fits how processes divide rows and models.

    Raises:
        InputError: It compares rows or heads that are in different processes, or needs weights that are divided.
    """
    if loss.ACROSS_ROWS and not loss.GATHERS and team.data_size > 1:
        raise InputError(
            setting.key, f"{loss.name} compares the rows of a batch, which {team.data_size} processes split", remedy="run one process"
        )
    if loss.OWN_INPUTS and team.shards:
        divides = f"parallel: {{{team.settings}}} divides"
        raise InputError(setting.key, f"{loss.name} needs the whole embeddings, which {divides}", remedy="give parallel: {strategy: ddp}")
    if team.pipeline > 1 and (loss.ACROSS_ROWS or not loss.ANSWERS_ONLY):
        raise InputError(
            setting.key,
            f"{loss.name} compares more than the answers of a row, and parallel.pipeline: {team.pipeline} divides blocks and batches",
            remedy="give pipeline: 1, or soft_target",
        )
    shares, without = ("sequence: true", "sequence: false") if team.sequence else (f"context: {team.context}", "context: 1")
    wanted = loss.wants(setting)
    compared = [
        what for what, holds in (("hidden states", "hidden"), ("attention", "blocks")) if any(getattr(each, holds) for each in wanted)
    ]
    if compared and (team.context > 1 or (team.sequence and compared[0] == "hidden states")):
        raise InputError(
            setting.key,
            f"{loss.name} compares {compared[0]}, whose tokens parallel.{shares} shares among processes",
            remedy=f"give {without}, or losses that compare answers (soft_target)",
        )
    if team.tensor > 1 and any(wanted.blocks for wanted in loss.wants(setting)):
        raise InputError(
            setting.key,
            f"{loss.name} compares attention, whose heads parallel.tensor: {team.tensor} shares among processes",
            remedy="give tensor: 1, or losses that compare answers or hidden states (soft_target, hidden, pkd)",
        )


def check_first(setting: Setting, name: str) -> None:
    """Checks that the first token of a row can represent the row.

    Raises:
        InputError: One of the models is causal: its first token attends only to itself.
    """
    for side, shape in (("student", setting.student), ("teacher", setting.teacher)):
        if shape.causal:
            raise InputError(
                setting.key,
                f"{name} of the first token given",
                f"the {side} is a {shape.kind}, whose first token attends only to itself",
                f"give {name} with other tokens in `losses`, or another loss",
            )


def projection(student: int, teacher: int) -> nn.Module:
    """Returns the projection from the student's to the teacher's width: a linear layer without bias, the identity for equal widths."""
    from torch import nn

    return nn.Identity() if student == teacher else nn.Linear(student, teacher, bias=False)


def zero_padding(hidden_bLD: Tensor, mask_bL: Tensor) -> Tensor:
    """Returns hidden states, float `[b, L, D]`, with padding set to 0; unlike a multiplication by 0, this keeps a NaN in padding out of the
    loss and its gradient."""
    import torch

    return torch.where(mask_bL[:, :, None], hidden_bLD, torch.zeros((), dtype=hidden_bLD.dtype, device=hidden_bLD.device))


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of each row over its tokens, `[b]`.

    Args:
        values: Float `[b, L]`; ignored where `mask` is False, but the gradient is finite only if the ignored values are finite.
        mask: Bool `[b, L]`.
    """
    import torch

    masked = torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    return masked.sum(dim=1) / mask.sum(dim=1)
