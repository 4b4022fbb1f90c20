"""Hidden states: the student matches the teacher's hidden states, layer by layer.

    FitNets   loss_b = sum_m mean_t mean_d (W h_s,m - h_t,g(m))^2                        https://arxiv.org/abs/1412.6550, section 2.1
    PKD       loss_b = sum_m || W h_s,m / |W h_s,m| - h_t,g(m) / |h_t,g(m)| ||^2, t = 1  https://arxiv.org/abs/1908.09355, section 3.2
    searched  FitNets with g searched for each row, after CoFi                             https://arxiv.org/abs/2204.00408, section 3.3

m runs over the layer pairs (`foundation.training.distillation.layer_maps`), t over the tokens of the row (PKD: only the first, the [CLS]
token), d over the hidden dimensions. W is one linear projection shared by all layers; equal widths need none. Of encoder-decoders the
encoders are compared on the source and the decoders on the target, each with a layer map of its own; the losses are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from foundation.training.losses.distillation.loss import Loss, SearchedMap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Captured, Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting


class Hidden(Loss):
    """Distance between the hidden states of paired layers."""

    BY_STACK: ClassVar[bool] = True

    name: Literal["hidden"] = "hidden"
    """Distance between the hidden states of paired layers."""
    layers: SearchedMap = "uniform"
    """The teacher layer for each student layer: uniform, skip or last (these two leave the student's last layer to the logits), a list
    counted from 1, or searched: for each row the closest teacher layers in ascending order (CoFi)."""
    tokens: Literal["all", "first"] = "all"
    """Tokens to compare: all of the row, or only the first, which represents the row ([CLS])."""
    normalize: bool = False
    """Whether to normalize hidden states to unit length first (PKD) or compare them as they are (FitNets)."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The hidden states of both models.

        Raises:
            InputError: The layers cannot be paired, or the first token cannot represent its row.
        """
        from foundation.training.distillation.capture import Wanted
        from foundation.training.losses.distillation.loss import check_first

        self._pairs(setting)
        if self.tokens == "first":
            check_first(setting, self.name)
        return Wanted(hidden=True), Wanted(hidden=True)

    def build(self, setting: Setting) -> nn.Module | None:
        """The projection to the teacher's width."""
        from foundation.training.losses.distillation.loss import projection

        return projection(setting.student.hidden, setting.teacher.hidden)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `hidden`."""
        assert trained is not None
        stacks = zip(inputs.student.stacks, inputs.teacher.stacks, self._pairs(inputs.setting), strict=True)
        found = [self._of_stack(ours, theirs, layers, trained) for ours, theirs, layers in stacks]
        return {"hidden": sum(found[1:], start=found[0])}

    def _of_stack(self, ours: Captured, theirs: Captured, layers: Sequence[tuple[int, int]], trained: nn.Module) -> Tensor:
        """Returns the loss of one stack of layers, float `[b]`."""
        import torch

        from foundation.training.distillation.layer_maps import searched

        assert ours.mask is not None
        mask_bL = ours.mask[:, :1] if self.tokens == "first" else ours.mask
        length, student, teacher = mask_bL.shape[1], ours.hidden, theirs.hidden

        def distances(ours: int, *theirs: int) -> list[Tensor]:
            mapped_bLD = trained(student[ours][:, :length])
            return [distance(mapped_bLD, teacher[layer][:, :length], mask_bL, self.normalize) for layer in theirs]

        if self.layers == "searched":
            rows = [torch.stack(distances(layer, *range(1, len(teacher))), dim=1) for layer in range(1, len(student))]
            distance_bST = torch.stack(rows, dim=1)
            return distance_bST.gather(2, searched(distance_bST)[:, :, None]).sum(dim=(1, 2))
        losses = [distances(mine, its)[0] for mine, its in layers]
        return sum(losses[1:], start=losses[0])

    def _pairs(self, setting: Setting) -> list[tuple[tuple[int, int], ...]]:
        """Returns the pairs of layers of each stack."""
        from foundation.training.distillation.layer_maps import pairs

        layers = "uniform" if self.layers == "searched" else self.layers  # a search too needs a teacher at least as deep as the student
        depths = zip(setting.student.depths, setting.teacher.depths, strict=False)  # `check_stacks` compares their number
        return [pairs(layers, *both, f"{setting.key}.layers") for both in depths]


def distance(student_bLD: Tensor, teacher_bLD: Tensor, mask_bL: Tensor, normalize: bool = False) -> Tensor:
    """Returns the squared distance of the hidden states, averaged over the tokens of each row, float32 `[b]`.

    Args:
        student_bLD: Hidden states, float `[b, L, D]`.
        teacher_bLD: Hidden states, float `[b, L, D]`; detached.
        mask_bL: Tokens to compare, bool `[b, L]`.
        normalize: Whether to compare unit vectors; squared differences are then summed over the width instead of averaged.
    """
    from torch.nn import functional

    from foundation.training.losses.distillation.loss import row_mean, zero_padding

    student_bLD, teacher_bLD = zero_padding(student_bLD.float(), mask_bL), zero_padding(teacher_bLD.float(), mask_bL)
    if normalize:
        student_bLD, teacher_bLD = functional.normalize(student_bLD, dim=2), functional.normalize(teacher_bLD, dim=2)
        return row_mean((student_bLD - teacher_bLD).square().sum(dim=2), mask_bL)
    return row_mean((student_bLD - teacher_bLD).square().mean(dim=2), mask_bL)
