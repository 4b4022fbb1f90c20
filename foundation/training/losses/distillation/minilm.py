"""MiniLM: the student's last layer learns the self-attention relations between tokens of one teacher layer.

    R(X, Y) = softmax(X Y^T / sqrt(d)) over the keys a query may attend to         KL(R_t || R_s) summed over keys

    MiniLM    loss_b = mean_h,t KL(R(Q, K)) + mean_h,t KL(R(V, V))                 attention heads, teacher's last layer
              https://arxiv.org/abs/2002.10957, section 3
    MiniLMv2  loss_b = sum over X in {Q, K, V} of mean_r,t KL(R(X, X))             r: relation heads, any teacher layer
              https://arxiv.org/abs/2012.15828, section 3

MiniLMv2 splits the concatenated heads into relation heads, so student and teacher may have different numbers of attention heads. Neither
loss needs equal widths, as only relations are compared. The loss of a row is the mean over its tokens t. The presets add soft targets:
relations alone do not train the head. Not supported: teacher assistants (use two distill stages instead).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from foundation.core.errors import InputError
from foundation.training.losses.distillation.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting

MOST_RELATION_HEADS = 48
MASKED_SCORE = -1e4  # exp underflows to exactly 0; -inf would turn queries that attend to nothing (padding) into NaN


class MiniLM(Loss):
    """Attention and value relations of the last layer."""

    name: Literal["minilm"] = "minilm"
    """Attention and value relations of the last layer; needs equal numbers of heads."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The last layer of both models.

        Raises:
            InputError: The models have different numbers of heads.
        """
        from foundation.training.distillation.capture import Wanted

        student, teacher = setting.student, setting.teacher
        if not setting.same_heads:
            raise InputError(setting.key, "minilm given", setting.heads, "give minilmv2, which works with any numbers")
        return Wanted(blocks=frozenset({student.layers - 1})), Wanted(blocks=frozenset({teacher.layers - 1}))

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `attention_relation` and `value_relation`."""
        from foundation.training.distillation.capture import visible_in_both

        student = inputs.student.blocks[inputs.setting.student.layers - 1]
        teacher = inputs.teacher.blocks[inputs.setting.teacher.layers - 1]
        assert inputs.student.mask is not None
        masks = visible_in_both(student, teacher, inputs.student.mask), inputs.student.mask
        attention = relation_divergence(student.scores(), teacher.scores(), *masks)
        values = relation_divergence(scaled_products(student.value), scaled_products(teacher.value), *masks)
        return {"attention_relation": attention, "value_relation": values}


class MiniLMv2(Loss):
    """Query, key and value relations of the student's last layer and any teacher layer."""

    name: Literal["minilmv2"] = "minilmv2"
    """Query, key and value relations of the student's last layer and any teacher layer."""
    relation_heads: Annotated[int, Field(ge=1)] | None = None
    """Number of relation heads; must divide the width of both models. Absent: the largest possible number up to 48."""
    teacher_layer: Annotated[int, Field(ge=1)] | None = None
    """Teacher layer, counted from 1; absent: the last, the best choice for 12 layers. For 24 layers the paper uses 21 (BERT) or 19."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The student's last layer and one teacher layer.

        Raises:
            InputError: The teacher has no such layer, or the heads do not divide the widths.
        """
        from foundation.training.distillation.capture import Wanted

        student, teacher = setting.student, setting.teacher
        if self.teacher_layer is not None and self.teacher_layer > teacher.layers:
            raise InputError(f"{setting.key}.teacher_layer", f"{self.teacher_layer} given", f"the teacher has {teacher.layers} layers")
        heads = self._heads(setting)
        if student.attention % heads or teacher.attention % heads:
            raise InputError(
                f"{setting.key}.relation_heads",
                f"{heads} given",
                f"a divisor of both widths is allowed (student {student.attention}, teacher {teacher.attention})",
            )
        return Wanted(blocks=frozenset({student.layers - 1})), Wanted(blocks=frozenset({self._layer(setting)}))

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `query_relation`, `key_relation` and `value_relation`."""
        from foundation.training.distillation.capture import visible_in_both

        student = inputs.student.blocks[inputs.setting.student.layers - 1]
        teacher = inputs.teacher.blocks[self._layer(inputs.setting)]
        assert inputs.student.mask is not None
        allowed = visible_in_both(student, teacher, inputs.student.mask)
        heads = self._heads(inputs.setting)
        parts = {}
        for name in ("query", "key", "value"):
            ours, theirs = (scaled_products(relation_heads(getattr(side, name), heads)) for side in (student, teacher))
            parts[f"{name}_relation"] = relation_divergence(ours, theirs, allowed, inputs.student.mask)
        return parts

    def _heads(self, setting: Setting) -> int:
        if self.relation_heads is not None:
            return self.relation_heads
        both = math.gcd(setting.student.attention, setting.teacher.attention)
        return max(heads for heads in range(1, MOST_RELATION_HEADS + 1) if both % heads == 0)

    def _layer(self, setting: Setting) -> int:
        return (self.teacher_layer or setting.teacher.layers) - 1


def relation_heads(x_bhLd: Tensor, heads: int) -> Tensor:
    """Splits the concatenated heads into relation heads: `[b, h, L, d]` -> `[b, heads, L, h d / heads]`."""
    rows, _, length, _ = x_bhLd.shape
    return x_bhLd.transpose(1, 2).reshape(rows, length, heads, -1).transpose(1, 2)


def scaled_products(x_bhLd: Tensor) -> Tensor:
    """Returns X X^T / sqrt(d), float32 `[b, h, L, L]`."""
    from foundation.training.precision import in_float32

    with in_float32(x_bhLd):
        x_bhLd = x_bhLd.float()
        return x_bhLd @ x_bhLd.mT / math.sqrt(x_bhLd.shape[-1])


def relation_divergence(student_bhLL: Tensor, teacher_bhLL: Tensor, allowed_bLL: Tensor, mask_bL: Tensor) -> Tensor:
    """Returns KL(softmax(teacher) || softmax(student)), summed over keys and averaged over the heads and tokens of a row, float32 `[b]`.

    Args:
        student_bhLL: Scores, float `[b, h, queries, keys]`.
        teacher_bhLL: Scores, float `[b, h, queries, keys]`; detached.
        allowed_bLL: Keys each query may attend to, bool `[b, 1, queries, keys]`.
        mask_bL: False for padding, bool `[b, L]`.
    """
    from torch.nn import functional

    from foundation.training.losses.distillation.loss import row_mean

    masked_bLL = ~(allowed_bLL & mask_bL[:, None, :, None])
    log_q, log_p = (
        functional.log_softmax(scores.float().masked_fill(masked_bLL, MASKED_SCORE), dim=-1) for scores in (student_bhLL, teacher_bhLL)
    )
    divergence_bhL = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
    return row_mean(divergence_bhL.mean(dim=1), mask_bL)
