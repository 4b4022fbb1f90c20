"""TinyBERT: embeddings, attention scores and hidden states first, answers after (https://arxiv.org/abs/1909.10351, section 3).

    embedding_b = mean_t,d (W_e h_s,0 - h_t,0)^2
    attention_b = sum_m mean_h,i,j (S_s,m - S_t,g(m))^2       S = Q K^T / sqrt(d) before the softmax, i and j tokens that see each other
    hidden_b    = sum_m mean_t,d (W_h h_s,m - h_t,g(m))^2
    answers_b   = soft targets with T = 1

The first three are this loss; the preset gives it the first part of the training and soft targets the rest: the two phases of the
paper. W_e and W_h are linear maps where the widths differ. Left out: a learning rate for each phase, augmented data, and the masking
of the official code, which compares padding as zeros (and so makes short rows count less).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from compress.core.errors import InputError
from distill.capture import Wanted, seen_by_both
from distill.layer_maps import LayerMap, pairs
from distill.losses.hidden import distance
from distill.losses.loss import Loss, Seen, Setting, projection


class TinyBert(Loss):
    """Embeddings, attention scores and hidden states."""

    name: Literal["tinybert"] = "tinybert"
    """Embeddings, attention scores and hidden states of several layers."""
    layers: LayerMap = "uniform"
    """Teacher's layer for each of the student's: uniform, skip or last (both leave the last layer out), or a list, from 1."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """Hidden states and heads of the paired layers.

        Raises:
            InputError: The layers cannot be paired, or the numbers of heads differ.
        """
        if not setting.same_heads:
            raise InputError(f"{setting.key}: tinybert given; {setting.heads}; as many are needed")
        ours, theirs = zip(*self._pairs(setting), strict=True)
        return (
            Wanted(hidden=True, blocks=frozenset(layer - 1 for layer in ours)),
            Wanted(hidden=True, blocks=frozenset(layer - 1 for layer in theirs)),
        )

    def build(self, setting: Setting) -> nn.Module | None:
        """W_e and W_h."""
        widths = setting.student.hidden, setting.teacher.hidden
        return nn.ModuleList([projection(*widths), projection(*widths)])

    def parts(self, seen: Seen, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `embedding`, `attention` and `hidden`."""
        assert isinstance(trained, nn.ModuleList)
        student, teacher, mask_bL = seen.student, seen.teacher, seen.student.mask
        assert mask_bL is not None
        embedding = distance(trained[0](student.hidden[0]), teacher.hidden[0], mask_bL)
        attention, hidden = [], []
        for ours, theirs in self._pairs(seen.setting):
            hidden.append(distance(trained[1](student.hidden[ours]), teacher.hidden[theirs], mask_bL))
            mine, its = student.blocks[ours - 1], teacher.blocks[theirs - 1]
            allowed = seen_by_both(mine, its, mask_bL) & mask_bL[:, None, :, None]
            scores = [heads.scaling * heads.query @ heads.key.mT for heads in (mine, its)]
            attention.append(score_distance(scores[0], scores[1], allowed))
        return {"embedding": embedding, "attention": torch.stack(attention).sum(dim=0), "hidden": torch.stack(hidden).sum(dim=0)}

    def _pairs(self, setting: Setting) -> tuple[tuple[int, int], ...]:
        return pairs(self.layers, setting.student.layers, setting.teacher.layers, f"{setting.key}.layers")


def score_distance(student_bhLL: Tensor, teacher_bhLL: Tensor, allowed_bLL: Tensor) -> Tensor:
    """Returns the mean squared difference of the attention scores of each row, over its heads and pairs of tokens, float32 `[b]`.

    Args:
        student_bhLL: Scores before the softmax, float `[b, h, queries, keys]`.
        teacher_bhLL: Scores before the softmax, float `[b, h, queries, keys]`; take no gradient.
        allowed_bLL: Pairs that count, bool `[b, 1, queries, keys]`.
    """
    apart_bhLL = student_bhLL.float() - teacher_bhLL.float()
    kept_bhLL = torch.where(allowed_bLL, apart_bhLL, torch.zeros((), device=apart_bhLL.device))
    return kept_bhLL.square().mean(dim=1).sum(dim=(1, 2)) / allowed_bLL.sum(dim=(1, 2, 3))
