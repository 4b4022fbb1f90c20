"""What every distillation loss has in common: a weight, a span of the training, and parts of the loss for every row.

A loss is a config with three methods. `wants` says what has to be looked at in student and teacher, `build` makes what is trained
along (projections between widths), `parts` gives the loss of each row. The formulas are pure tensor functions in the file of the loss.
Unless a loss says otherwise, a value of a row depends on that row alone, whatever it is batched with or padded to, so that splitting a
batch changes nothing; means over tokens are means over the tokens of the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from compress.core.config import Config
from compress.core.errors import InputError
from compress.core.tasks import Task
from compress.models.own_shape import SHAPE_KEY
from compress.training.train import Batch
from distill.capture import Captured, Wanted
from distill.schedules import Ramp, always_zero, smallest

if TYPE_CHECKING:
    from distill.teacher import Pair


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that losses look at; 0 for what it does not have."""

    kind: str
    layers: int
    hidden: int
    heads: int
    """0 where layers differ, as pruning may leave them."""
    classes: int
    inner: int = 0
    """Numbers of all heads of a layer, what all layers have in common; 0 where that is the width."""
    causal: bool = False
    """Whether a token sees only those before it."""

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Reads them off a Transformers config."""
        layers, hidden, heads = (getattr(config, name, 0) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        own, head_dim = getattr(config, SHAPE_KEY, None), getattr(config, "head_dim", None)
        inner = heads * head_dim if head_dim else 0
        if own:
            inner = math.gcd(*(number * own["head_dim"] for number in own["heads"]))
            heads = own["heads"][0] if len(set(own["heads"])) == 1 else 0
        return cls(config.model_type, layers, hidden, heads, config.num_labels, inner, is_causal(config))

    @property
    def attention(self) -> int:
        """Numbers of all heads of a layer."""
        return self.inner or self.hidden


@dataclass(frozen=True)
class Setting:
    """What a loss is used in."""

    student: Shape
    teacher: Shape
    task: Task
    key: str
    """Key path of the loss in the recipe, for messages."""
    part: bool = False
    """Whether the student is a part of the teacher, of which then only that part is seen: every head has its like."""

    @property
    def same_heads(self) -> bool:
        """Whether the heads of a layer of the student can be compared with those of one of the teacher, one by one."""
        return self.part or (bool(self.student.heads) and self.student.heads == self.teacher.heads)

    @property
    def heads(self) -> str:
        """How many heads both have, for messages."""
        ours, theirs = (str(shape.heads or "unlike numbers of") for shape in (self.student, self.teacher))
        return f"the student has {ours} heads, the teacher {theirs}"


@dataclass(frozen=True)
class Seen:
    """What a loss is computed from."""

    setting: Setting
    batch: Batch
    temperature: float
    student: Captured
    teacher: Captured
    pair: Pair
    """Both models, for a loss that asks them about other inputs."""


class Loss(Config):
    """Base of every loss: when it counts, and how much."""

    ANSWERS_ONLY: ClassVar[bool] = False
    """Whether only logits are compared, so that the teacher may have another tokenizer."""
    COMPARES_ANSWERS: ClassVar[bool] = False
    """Whether answers are compared, at least of mixtures: plain text has none to learn."""
    ONE_ANSWER: ClassVar[bool] = False
    """Whether each row has one answer, or is one point: text-generation answers at every token."""
    OWN_INPUTS: ClassVar[bool] = False
    """Whether the models are asked about inputs of its own, made with their embeddings, which a divided model does not have whole."""
    ACROSS_ROWS: ClassVar[bool] = False
    """Whether rows of a batch are compared with each other, so that it has to be in memory whole."""

    weight: Annotated[float, Field(gt=0)] | Ramp = 1.0
    """Factor of the loss; {start, end} changes it in a straight line over the training."""
    steps: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]] = (0.0, 1.0)
    """Part of the training in which the loss counts, as fractions of its steps."""

    @model_validator(mode="after")
    def _in_order(self) -> Loss:
        if self.steps[0] >= self.steps[1]:
            raise ValueError(f"steps: {list(self.steps)} given; the first fraction has to be below the second")
        if smallest(self.weight) < 0:
            raise ValueError("weight: at least 0 at both ends")
        if always_zero(self.weight):
            raise ValueError("weight: 0 given at both ends; one has to be above 0, or leave the loss out")
        return self

    def counts(self, step: int, num_steps: int) -> bool:
        """Returns whether the loss counts in step `step` (from 0)."""
        return self.steps[0] * num_steps <= step < self.steps[1] * num_steps

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """Returns what has to be looked at in the student and in the teacher.

        Raises:
            InputError: The loss does not fit these two models.
        """
        raise NotImplementedError

    def build(self, setting: Setting) -> nn.Module | None:
        """Returns what is trained along with the student; None where there is nothing."""
        return None

    def prepare(self, pair: Pair) -> None:
        """Finds out what only the loaded models can tell.

        Raises:
            InputError: The loss does not fit them.
        """

    def parts(self, seen: Seen, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns the parts of the loss by name, float `[b]` each, without the weight."""
        raise NotImplementedError


def is_causal(config: Any) -> bool:
    """Whether the tokens of a model see only those before them: Transformers has a head for the next token for it, but none for hidden
    ones, or its config says that it is a decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = config.model_type
    next_alone = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return next_alone or bool(getattr(config, "is_decoder", False))


def check_first(setting: Setting, name: str) -> None:
    """Finds out whether the first token of a row can stand for it.

    Raises:
        InputError: It sees nothing but itself in one of the models.
    """
    for side, shape in (("student", setting.student), ("teacher", setting.teacher)):
        if shape.causal:
            raise InputError(
                f"{setting.key}: {name} of the first token given; the {side} is a {shape.kind}, whose first token sees only itself: "
                f"give {name} with other tokens in `losses`, or another loss"
            )


def projection(student: int, teacher: int) -> nn.Module:
    """Returns what brings the student's hidden states to the teacher's width: a linear map without bias, nothing for equal widths."""
    return nn.Identity() if student == teacher else nn.Linear(student, teacher, bias=False)


def kept(hidden_bLD: Tensor, mask_bL: Tensor) -> Tensor:
    """Returns hidden states, float `[b, L, D]`, with 0 in the place of padding: what padding holds then reaches neither a loss nor its
    gradient, where 0 times NaN would be NaN."""
    return torch.where(mask_bL[:, :, None], hidden_bLD, torch.zeros((), dtype=hidden_bLD.dtype, device=hidden_bLD.device))


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of each row over its tokens, `[b]`.

    Args:
        values: Float `[b, L]`; may be anything where `mask` is false, but the gradient of what they come from is finite only if that is.
        mask: Bool `[b, L]`.
    """
    counted = torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    return counted.sum(dim=1) / mask.sum(dim=1)
