"""Hard concrete gates: random gates in [0, 1] that are often exactly 0 or 1, with a differentiable probability of being open.

    u ~ Uniform(0, 1),   s = sigmoid((log u - log(1 - u) + log_alpha) / beta)
    z = min(1, max(0, s (zeta - gamma) + gamma))                               sample, differentiable in log_alpha where 0 < z < 1
    P(z > 0) = sigmoid(log_alpha - beta log(-gamma / zeta))                    expected L0 norm of a gate
    z_fixed  = min(1, max(0, sigmoid(log_alpha) (zeta - gamma) + gamma))       without noise

beta = 2/3, gamma = -0.1, zeta = 1.1: Louizos et al. 2018, https://arxiv.org/abs/1712.01312, section 2.2, eqs. 10 to 13. As in CoFi's code,
log_alpha is clamped to +-`BOUND`, so that every gate can reopen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
BOUND = math.log(100)
OPEN = 2.5
"""Initial log_alpha: a gate is above 0 with probability 98 %, and exactly 1 without noise."""
SMALLEST = 1e-6


def draw(log_alpha: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Returns one sample per gate, float32 in [0, 1].

    Args:
        log_alpha: Float.
        generator: Draws the noise, on the CPU; None: torch's own.
    """
    u = torch.rand(log_alpha.shape, generator=generator, dtype=log_alpha.dtype).to(log_alpha.device).clamp(SMALLEST, 1 - SMALLEST)
    stretched = torch.sigmoid((u.log() - (-u).log1p() + log_alpha) / BETA) * (ZETA - GAMMA) + GAMMA
    return stretched.clamp(0, 1)


def present(log_alpha: Tensor) -> Tensor:
    """Returns the probability that a gate is above 0."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def fixed(log_alpha: Tensor) -> Tensor:
    """Returns gates without noise, in [0, 1]."""
    return (torch.sigmoid(log_alpha) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
