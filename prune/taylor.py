"""Taylor: first-order change of the loss when a unit is removed.

    score_s = mean_b | sum over the weights w that read s of w * dL_b / dw |  =  mean_b | dL_b / dg_s |       g_s: its gate (`prune.gates`)

Michel et al. 2019, https://arxiv.org/abs/1905.10650, section 4.1, for heads; Molchanov et al. 2019, https://arxiv.org/abs/1906.10771, eq. 8
for neurons and channels. The absolute value is taken per row b, before the mean: a unit that helps one row and hurts another matters to
both. Not used: the per-layer normalization of Michel et al., since the loss has the same unit in all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def taylor(gradient_bS: Tensor) -> Tensor:
    """Returns the score of each unit on a batch, float32 `[S]`.

    Args:
        gradient_bS: Derivatives of each row's loss by its gates, float `[b, S]`.
    """
    return gradient_bS.float().abs().mean(dim=0)
