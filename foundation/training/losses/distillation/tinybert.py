"""TinyBERT: match embeddings, attention scores and hidden states first, logits later (https://arxiv.org/abs/1909.10351, section 3).

    embedding_b = mean_t,d (W_e h_s,0 - h_t,0)^2
    attention_b = sum_m mean_h,i,j (S_s,m - S_t,g(m))^2       S = Q K^T / sqrt(d) before the softmax; i may attend to j
    hidden_b    = sum_m mean_t,d (W_h h_s,m - h_t,g(m))^2
    logits_b    = soft targets with T = 1

This loss is the first three terms; the preset uses it in the first part of the training and soft targets in the rest, like the two phases
of the paper. W_e and W_h are linear projections, used where the widths differ. Not supported: a learning rate per phase and data
augmentation. Unlike the official code, which compares padding as zeros and so gives short rows less weight, padding is excluded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from foundation.core.errors import InputError
from foundation.training.losses.distillation.loss import LayerMap, Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting


class TinyBert(Loss):
    """Embeddings, attention scores and hidden states."""

    name: Literal["tinybert"] = "tinybert"
    """Embeddings, and attention scores and hidden states of paired layers."""
    layers: LayerMap = "uniform"
    """The teacher layer for each student layer: uniform, skip or last (these two leave out the student's last layer), or a list counted
    from 1."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """Hidden states and heads of the paired layers.

        Raises:
            InputError: The layers cannot be paired, or the numbers of heads differ.
        """
        from foundation.training.distillation.capture import Wanted

        if not setting.same_heads:
            raise InputError(setting.key, "tinybert given", f"{setting.heads}: equal numbers are needed", "choose another loss")
        ours, theirs = zip(*self._pairs(setting), strict=True)
        return (
            Wanted(hidden=True, blocks=frozenset(layer - 1 for layer in ours)),
            Wanted(hidden=True, blocks=frozenset(layer - 1 for layer in theirs)),
        )

    def build(self, setting: Setting) -> nn.Module | None:
        """The projections W_e and W_h."""
        from torch import nn

        from foundation.training.losses.distillation.loss import projection

        widths = setting.student.hidden, setting.teacher.hidden
        return nn.ModuleList([projection(*widths), projection(*widths)])

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `embedding`, `attention` and `hidden`."""
        import torch
        from torch import nn

        from foundation.training.distillation.capture import visible_in_both
        from foundation.training.losses.distillation.hidden import distance

        assert isinstance(trained, nn.ModuleList)
        student, teacher, mask_bL = inputs.student, inputs.teacher, inputs.student.mask
        assert mask_bL is not None
        embedding = distance(trained[0](student.hidden[0]), teacher.hidden[0], mask_bL)
        attention, hidden = [], []
        for ours, theirs in self._pairs(inputs.setting):
            hidden.append(distance(trained[1](student.hidden[ours]), teacher.hidden[theirs], mask_bL))
            mine, its = student.blocks[ours - 1], teacher.blocks[theirs - 1]
            allowed = visible_in_both(mine, its, mask_bL) & mask_bL[:, None, :, None]
            attention.append(score_distance(mine.scores(), its.scores(), allowed))
        return {"embedding": embedding, "attention": torch.stack(attention).sum(dim=0), "hidden": torch.stack(hidden).sum(dim=0)}

    def _pairs(self, setting: Setting) -> tuple[tuple[int, int], ...]:
        from foundation.training.distillation.layer_maps import pairs

        return pairs(self.layers, setting.student.layers, setting.teacher.layers, f"{setting.key}.layers")


def score_distance(student_bhLL: Tensor, teacher_bhLL: Tensor, allowed_bLL: Tensor) -> Tensor:
    """Returns the squared difference of attention scores, averaged over the heads and token pairs of each row, float32 `[b]`.

    Args:
        student_bhLL: Scores before the softmax, float `[b, h, queries, keys]`.
        teacher_bhLL: Scores before the softmax, float `[b, h, queries, keys]`; detached.
        allowed_bLL: Pairs to compare, bool `[b, 1, queries, keys]`.
    """
    import torch

    difference_bhLL = student_bhLL.float() - teacher_bhLL.float()
    masked_bhLL = torch.where(allowed_bLL, difference_bhLL, torch.zeros((), device=difference_bhLL.device))
    return masked_bhLL.square().mean(dim=1).sum(dim=(1, 2)) / allowed_bLL.sum(dim=(1, 2, 3))
