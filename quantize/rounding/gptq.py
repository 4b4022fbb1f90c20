"""GPTQ: rounds weights one input at a time; the weights not rounded yet compensate the error.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323, algorithm 1. Every output o has its own problem min_q (w - s q) H (w - s q)^T with a
common H = mean of x x^T. With U the upper Cholesky factor of the inverse, H^-1 = U^T U, the inputs j = 1, 2, ... are rounded in turn:

    q_j = clamp(rint(w_j / s_j)),    e = (w_j - s_j q_j) / U_jj,    w_k <- w_k - e U_jk   for k > j

With zero points q is the code less the zero point: only its range differs, from group to group, and always includes 0.

Row j of U equals, up to scaling, row j of the inverse of H without the inputs before j, so this is Optimal Brain Surgeon with a single
factorization for all outputs. Within a block of 32 inputs weights are updated at once; later inputs are updated at the end of the block.
A block of the paper has 128; one whose weights stay in the cache of a processor takes half of the time, and adds in another order.

    H <- H + 0.01 mean(diag H) I      so that the inverse exists; an input that is always 0 gets H_jj = 1 first, so it rounds to nearest
    act_order                         inputs with the largest H_jj first, while most weights are left to compensate
    w_j = 0 at the start              stays 0, which preserves sparsity; the others compensate for it as for any rounding error

Scales are given (static groups), per channel or per group of inputs; act_order does not change the group of an input.
The factor 2 of the paper's H changes nothing. Zeros that stay are its joint form with pruning (SparseGPT, https://arxiv.org/abs/2301.00774,
section 3.5). An output that ends with a larger error than by rounding to nearest keeps the nearest (`rounding.better_rows`), which the
paper has not.

Left out: scales of groups found on the way, from the weights as changed by then.

Tensor names carry their shapes: I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundation.core.inverse_factor import inverse_factor
from foundation.schemes.int4 import Bound

DAMPING = 0.01
BLOCK = 32


@dataclass(frozen=True)
class Elimination:
    """The part of the computation that all outputs share."""

    order_I: Tensor
    """The inputs in rounding order, int64."""
    factor_II: Tensor
    """U with its inputs in that order, float64."""


def gptq(
    weight_OI: Tensor, hessian_II: Tensor, scale_OI: Tensor, low: Bound, high: Bound, *, act_order: bool = True, damping: float = DAMPING
) -> Tensor:
    """Returns the codes of a weight, int8 [O, I].

    Args:
        weight_OI: float32.
        hessian_II: Mean of x x^T over the inputs, float32; a positive multiple gives the same codes.
        scale_OI: Scale of every weight, float32, positive.
        low: Smallest code, at most 0; of all weights, or of each.
        high: Largest code, at least 0, in the same form.
        act_order: Whether inputs with the largest H_jj come first.
        damping: Added to the diagonal, as a fraction of its mean.
    """
    return eliminate(weight_OI, elimination(hessian_II, act_order=act_order, damping=damping), scale_OI, low, high)


def elimination(hessian_II: Tensor, *, act_order: bool = True, damping: float = DAMPING) -> Elimination:
    """Returns order and factor for H, see `gptq`; needs the memory of one more float64 matrix."""
    inputs = len(hessian_II)
    diagonal_I = hessian_II.diagonal()
    order_I = diagonal_I.argsort(descending=True, stable=True) if act_order else torch.arange(inputs, device=hessian_II.device)
    ordered_II = hessian_II.new_empty(inputs, inputs, dtype=torch.float64)
    for start in range(0, inputs, BLOCK):
        ordered_II[start : start + BLOCK] = hessian_II[order_I[start : start + BLOCK]][:, order_I]
    return Elimination(order_I, inverse_factor(ordered_II, damping))


def eliminate(weight_OI: Tensor, elimination: Elimination, scale_OI: Tensor, low: Bound, high: Bound) -> Tensor:
    """Returns the codes of some outputs of a weight, int8 [O, I]; outputs are independent. See `gptq`."""
    inputs, order_I = weight_OI.shape[1], elimination.order_I
    # the weights of an input lie side by side
    left_IO, scale_IO = weight_OI.T[order_I], scale_OI.T[order_I]  # copies
    low, high = (bound if isinstance(bound, int) else bound.T[order_I].to(left_IO.dtype) for bound in (low, high))
    zero_IO = left_IO == 0
    keeps_zeros = bool(zero_IO.any())
    codes_IO = torch.empty(left_IO.shape, dtype=torch.int8, device=weight_OI.device)
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        factor_BI = elimination.factor_II[start:stop].to(weight_OI.dtype)
        error_BO, rounded_BO = torch.empty_like(left_IO[start:stop]), torch.empty_like(left_IO[start:stop])
        for j in range(start, stop):
            factor_I, rounded_O, error_O = factor_BI[j - start], rounded_BO[j - start], error_BO[j - start]
            lowest, highest = of_input(low, j), of_input(high, j)
            torch.div(left_IO[j], scale_IO[j], out=rounded_O).round_().clamp_(lowest, highest)
            if keeps_zeros:
                rounded_O.masked_fill_(zero_IO[j], 0)
            torch.addcmul(left_IO[j], rounded_O, scale_IO[j], value=-1, out=error_O).div_(factor_I[j])
            left_IO[j + 1 : stop].addr_(factor_I[j + 1 : stop], error_O, alpha=-1)
        codes_IO[start:stop] = rounded_BO.to(torch.int8)
        left_IO[stop:].addmm_(factor_BI[:, stop:].T, error_BO, alpha=-1)
    return codes_IO[order_I.argsort()].T.contiguous()


def of_input(bound: Bound, j: int) -> Any:
    """Returns the bound of the weights of an input: one for all, or [O]."""
    return bound if isinstance(bound, int) else bound[j]
