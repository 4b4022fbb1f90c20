"""The multiplier of the sparsity constraint: a PI controller adjusts it while masks are learned, until the constraint is met.

    min L over weights and masks, subject to s(masks) = t(step)          s: share of the cost removed, t: target
    step along the gradient of L - lambda s
    lambda = p sinh(u - K gap),   gap = s - t,   u <- u - k gap,   p = E sum_i |dL/da_i ds/da_i| / E sum_i (ds/da_i)^2

p estimates the loss per unit of cost from recent gradients, which makes the controller independent of the loss scale. The argument of sinh
has a proportional part (gain K) and an integral part u (gain k): near 0 lambda is proportional to it; far from 0 every further 1 % of gap
changes lambda by half. lambda becomes negative if too much is removed: the loss alone has no gradient that would reopen a closed gate.

CoFi and others use plain gradient ascent on the multipliers (Wang et al. 2020, https://arxiv.org/abs/1910.04732, section 3.2). Under Adam,
whose step size does not depend on the gap, that takes many epochs to settle: in half an epoch of SST-2 it removed 74 % of a model at a
target of 60 %.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

PROPORTIONAL, INTEGRAL = 40.0, 0.1
DECAY = 0.98
"""Decay of the running means of gradients: about the last 50 steps."""
STEEPEST = 5.0
"""Largest absolute argument of sinh."""
SMALLEST = 1e-20


class Price(nn.Module):
    """The multiplier and the state of its controller; saved with the training.

    Args:
        num_masks: Number of masks.
    """

    step: Tensor
    raised: Tensor
    gradient_N: Tensor
    slope_N: Tensor
    paid: Tensor
    bought: Tensor

    def __init__(self, num_masks: int) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(-1))
        self.register_buffer("raised", torch.zeros(()))
        self.register_buffer("gradient_N", torch.zeros(num_masks))
        self.register_buffer("slope_N", torch.zeros(num_masks))
        self.register_buffer("paid", torch.zeros(()))
        self.register_buffer("bought", torch.zeros(()))
        self.value = 0.0

    @torch.no_grad()
    def update(self, step: int, gap: float, slope_N: Tensor) -> float:
        """Returns the multiplier of a step; further micro-batches of the same step get the same value.

        Args:
            step: Number of the step.
            gap: Share of the cost removed, minus the target.
            slope_N: Derivatives of the removed share by each mask, float32 `[N]`.
        """
        if step != int(self.step):
            self.paid.lerp_((self.gradient_N * self.slope_N).abs().sum(), 1 - DECAY)
            self.bought.lerp_(self.slope_N.square().sum(), 1 - DECAY)
            self.raised.sub_(INTEGRAL * gap).clamp_(-STEEPEST, STEEPEST)
            self.gradient_N.zero_()
            self.slope_N.copy_(slope_N)
            self.step.fill_(step)
            exponent = max(-STEEPEST, min(STEEPEST, float(self.raised) - PROPORTIONAL * gap))
            self.value = float(self.paid / self.bought.clamp(min=SMALLEST)) * math.sinh(exponent)
        return self.value

    @torch.no_grad()
    def add_gradient(self, gradient_N: Tensor) -> None:
        """Adds the gradient of the loss by the masks for one micro-batch, float32 `[N]`."""
        self.gradient_N.add_(gradient_N)
