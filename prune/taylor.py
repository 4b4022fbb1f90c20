"""Taylor: how much the loss changes, to first order, when a structure is taken out.

    score_s = mean_b | sum over the weights w that read s of w * dL_b / dw |  =  mean_b | dL_b / dg_s |       g_s: its gate (`prune.gates`)

Michel et al. 2019, https://arxiv.org/abs/1905.10650, section 4.1, for heads; Molchanov et al. 2019, https://arxiv.org/abs/1906.10771, eq. 8
for neurons and channels. The absolute value stands inside of the mean over rows b: what helps one row and hurts the next is important to
both. Left out: the normalization of each layer of Michel et al., since a loss has one unit in all of them.
"""

from __future__ import annotations

from torch import Tensor


def taylor(gradient_bS: Tensor) -> Tensor:
    """Returns the score of each structure on some rows, float32 `[S]`.

    Args:
        gradient_bS: Derivatives of each row's loss by its gates, float `[b, S]`.
    """
    return gradient_bS.float().abs().mean(dim=0)
