"""Hidden states: the student learns what the teacher thinks between its layers.

    FitNets   loss_b = sum_m mean_t mean_d (W h_s,m - h_t,g(m))^2                        https://arxiv.org/abs/1412.6550, section 2.1
    PKD       loss_b = sum_m || W h_s,m / |W h_s,m| - h_t,g(m) / |h_t,g(m)| ||^2, t = 1  https://arxiv.org/abs/1908.09355, section 3.2
    searched  FitNets with g searched for each row, after CoFi                             https://arxiv.org/abs/2204.00408, section 3.3

m runs over the pairs of layers of `distill.layer_maps`, t over the tokens of the row (PKD: the first one, which stands for the text), d
over the width. W, one for all layers, is a linear map where the widths differ and nothing where they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from distill.capture import Wanted
from distill.layer_maps import SearchedMap, pairs, searched
from distill.losses.loss import Loss, Seen, Setting, check_first, kept, projection, row_mean


class Hidden(Loss):
    """Hidden states of several layers."""

    name: Literal["hidden"] = "hidden"
    """Hidden states of several layers."""
    layers: SearchedMap = "uniform"
    """Teacher's layer for each of the student's: uniform, skip or last (both leave the last layer to the answers), a list, from 1, or
    searched: for each row the closest layers in ascending order (CoFi)."""
    tokens: Literal["all", "first"] = "all"
    """Tokens that count: all of the row, or the first, which stands for the whole."""
    normalize: bool = False
    """Whether only directions are compared (PKD), or lengths too (FitNets)."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The hidden states of both.

        Raises:
            InputError: The layers cannot be paired, or the first token does not stand for its row.
        """
        self._pairs(setting)
        if self.tokens == "first":
            check_first(setting, self.name)
        return Wanted(hidden=True), Wanted(hidden=True)

    def build(self, setting: Setting) -> nn.Module | None:
        """The map to the width of the teacher."""
        return projection(setting.student.hidden, setting.teacher.hidden)

    def parts(self, seen: Seen, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `hidden`."""
        assert trained is not None
        assert seen.student.mask is not None
        mask_bL = seen.student.mask[:, :1] if self.tokens == "first" else seen.student.mask
        length, student, teacher = mask_bL.shape[1], seen.student.hidden, seen.teacher.hidden

        def apart(ours: int, *theirs: int) -> list[Tensor]:
            mapped_bLD = trained(student[ours][:, :length])
            return [distance(mapped_bLD, teacher[layer][:, :length], mask_bL, self.normalize) for layer in theirs]

        if self.layers == "searched":
            rows = [torch.stack(apart(layer, *range(1, len(teacher))), dim=1) for layer in range(1, len(student))]
            distance_bST = torch.stack(rows, dim=1)
            return {"hidden": distance_bST.gather(2, searched(distance_bST)[:, :, None]).sum(dim=(1, 2))}
        losses = [apart(ours, theirs)[0] for ours, theirs in self._pairs(seen.setting)]
        return {"hidden": sum(losses[1:], start=losses[0])}

    def _pairs(self, setting: Setting) -> tuple[tuple[int, int], ...]:
        layers = "uniform" if self.layers == "searched" else self.layers  # both need a teacher that is no shallower
        return pairs(layers, setting.student.layers, setting.teacher.layers, f"{setting.key}.layers")


def distance(student_bLD: Tensor, teacher_bLD: Tensor, mask_bL: Tensor, normalize: bool = False) -> Tensor:
    """Returns the mean over the tokens of each row of the mean squared difference, or of that of the unit vectors, float32 `[b]`.

    Args:
        student_bLD: Hidden states, float `[b, L, D]`.
        teacher_bLD: Hidden states, float `[b, L, D]`; take no gradient.
        mask_bL: Tokens that count, bool `[b, L]`.
        normalize: Compare unit vectors; their squared differences are summed over the width, not averaged.
    """
    student_bLD, teacher_bLD = kept(student_bLD.float(), mask_bL), kept(teacher_bLD.float(), mask_bL)
    if normalize:
        student_bLD, teacher_bLD = functional.normalize(student_bLD, dim=2), functional.normalize(teacher_bLD, dim=2)
        return row_mean((student_bLD - teacher_bLD).square().sum(dim=2), mask_bL)
    return row_mean((student_bLD - teacher_bLD).square().mean(dim=2), mask_bL)
