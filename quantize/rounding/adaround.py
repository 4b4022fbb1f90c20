"""AdaRound: learns for each weight whether to round up or down, minimizing the output error.

Nagel et al. 2020, https://arxiv.org/abs/2004.10568, section 3:

    q = clamp(floor(w / s) + h),     h = clamp(sigmoid(v) (zeta - gamma) + gamma, 0, 1),   zeta = 1.1, gamma = -0.1
    min over v   d H d^T + lambda sum (1 - |2 h - 1|^beta),       d = w - s q,   H = mean of x x^T

v is initialized so that q = w / s exactly. beta decays from 20 to 2 (cosine): at first most h can move freely, at the end all are pushed to
0 or 1. The regularizer is off in the first fifth of the steps. At the end h is rounded. The optimizer is Adam with an explicit gradient:
the gradient of the first term w.r.t. q is -2 s (d H).

The output error over all calibration rows is a function of H (`moments`), so every step uses all rows and nothing is sampled. Errors are
divided by the mean of diag H and by the mean square of an output's scales, so that lambda has the same effect in every layer. An output
whose error ends up larger than with rounding to nearest keeps the nearest codes (`rounding.better_rows`). A weight of 0 stays 0.

The inputs come from the network rounded so far (`rounding`), and so does the target W x^; the paper's asymmetric form takes W x of the
float network as target (section 3.3). Not supported: that form, and the activation function inside the loss (same section).

Tensor names carry their shapes: I inputs, O outputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foundation.schemes.int4 import Bound

ZETA, GAMMA = 1.1, -0.1
STEPS = 1000
LEARNING_RATE = 1e-2
PUSH = 1.0  # lambda: with 0.1 a tenth of the weights are still undecided at the end, with 1 none
WARM_UP = 0.2
BETA_START, BETA_END = 20.0, 2.0


def adaround(weight_OI: Tensor, hessian_II: Tensor, scale_OI: Tensor, low: Bound, high: Bound, *, steps: int = STEPS) -> Tensor:
    """Returns the codes of a weight, int8 [O, I]: each is w / s rounded down or up, within the range.

    Args:
        weight_OI: float32.
        hessian_II: Mean of x x^T over the inputs, float32.
        scale_OI: Scale of every weight, float32, positive.
        low: Smallest code, at most 0; of all weights, or of each. With zero points codes are counted from there.
        high: Largest code, at least 0, in the same form.
        steps: Number of Adam steps.
    """
    exact_OI = weight_OI / scale_OI
    below_OI = exact_OI.floor()
    # normalize errors by the RMS scale of an output, and by the mean square of the inputs
    unit_OI = scale_OI / scale_OI.square().mean(dim=1, keepdim=True).sqrt()
    hessian_II = hessian_II / hessian_II.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    start_OI = ((exact_OI - below_OI - GAMMA) / (ZETA - GAMMA)).logit()
    choice_OI = start_OI.detach().clone().requires_grad_(True)
    free_OI = weight_OI != 0  # zero weights get no gradient and keep their initial h = 0
    optimizer = torch.optim.Adam([choice_OI], lr=LEARNING_RATE)
    for step in range(steps):
        up_OI = rectified_sigmoid(choice_OI) * free_OI
        with torch.no_grad():
            code_OI = (below_OI + up_OI).clamp(min=low).clamp(max=high)
            inside_OI = code_OI == below_OI + up_OI
            gradient_OI = 2 * ((code_OI - exact_OI) * unit_OI @ hessian_II) * unit_OI * inside_OI
            gradient_OI += push(up_OI, step / steps)
        optimizer.zero_grad()
        up_OI.backward(gradient_OI)  # type: ignore[no-untyped-call]
        optimizer.step()
    chosen_OI = below_OI + (rectified_sigmoid(choice_OI.detach()) >= 0.5)
    return chosen_OI.clamp(min=low).clamp(max=high).to(torch.int8)


def rectified_sigmoid(choice_OI: Tensor) -> Tensor:
    """Returns h in [0, 1]; h reaches both ends, where its gradient is 0."""
    return (choice_OI.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def push(up_OI: Tensor, progress: float) -> Tensor:
    """Returns the gradient of lambda sum (1 - |2 h - 1|^beta) w.r.t. h; `progress` goes from 0 to 1."""
    if progress < WARM_UP:
        return torch.zeros_like(up_OI)
    beta = BETA_END + 0.5 * (BETA_START - BETA_END) * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
    centred_OI = 2 * up_OI - 1
    return -2 * PUSH * beta * centred_OI.abs().pow(beta - 1) * centred_OI.sign()
