"""Fisher: second-order change of the loss when a unit is removed from a model at a minimum.

    L(g_s = 0) - L  ~  1/2 d^2 L / dg_s^2  ~  1/2 F_ss,       F_ss = mean over rows of (dL_b / dg_s)^2       g_s: its gate (`prune.gates`)
    score_s = 1/2 F_ss

At a minimum the gradient is 0, and the Hessian of a log-likelihood is the Fisher information. Its diagonal is the mean squared gradient of
single rows: Kwon et al. 2022, https://arxiv.org/abs/2204.09656, section 4.1; Theis et al. 2018, https://arxiv.org/abs/1801.05787.
Limitations: off-diagonal terms are ignored, i.e. the interaction of two removed units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def fisher(gradient_bS: Tensor) -> Tensor:
    """Returns the score of each unit on a batch, float32 `[S]`.

    Args:
        gradient_bS: Derivatives of each row's loss by its gates, float `[b, S]`.
    """
    return gradient_bS.float().square().mean(dim=0) / 2
