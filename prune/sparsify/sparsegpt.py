"""SparseGPT: weights are zeroed one input at a time, and those of later inputs make up for it (Frantar and Alistarh 2023,
https://arxiv.org/abs/2301.00774, algorithm 1).

Every output has its own problem min (w - w') H (w - w')^T, with one H = sum of x x^T. With H^-1 = U^T U (`compress.core.inverse_factor`)
the inputs j = 1, 2, ... are settled in turn, and of those that go

    e = w_j / U_jj,     w_k <- w_k - e U_jk   for k >= j        which makes w_j 0

Which weights go is chosen as late as the pattern lets it, from the weights as they are by then (adaptive mask selection, section 3.3):

    S_oi = w_oi^2 / U_ii^2       the error that zeroing it costs, all later inputs making up for it
    unstructured   for 128 inputs together, over all outputs        N:M   for each group of M inputs
    block R x C    for as many strips of C inputs as 128 hold

The update goes on at once inside of a stretch of inputs of about 128, and for all later inputs together at its end. In choosing blocks the
error of a block is taken as the sum of those of its weights; what whole blocks of some strips took too much or too little, the next ones
make up for. Weights of inputs that were always 0 do nothing and become 0 first, as in the paper's code. Zeros that are to be held stay 0,
and the others make up for what an update would have given them. Left out: the joint choice of zeros and integers; GPTQ keeps zeros instead.

Tensor names carry their shapes: O outputs, I inputs, B inputs of a stretch, C inputs chosen for together, S x T blocks of those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.core.inverse_factor import inverse_factor
from prune.sparsify.patterns import NM, Blocks, Pattern, block_means, block_sizes, highest_blocks, mask, num_zeros, spread

DAMPING = 0.01
STRETCH = 128


def sparsegpt(
    weight_OI: Tensor,
    hessian_II: Tensor,
    pattern: Pattern,
    sparsity: float,
    damping: float = DAMPING,
    held_OI: Tensor | None = None,
) -> Tensor:
    """Returns the weights with zeros in the pattern and the others updated, float32 `[O, I]`.

    Args:
        weight_OI: float32.
        hessian_II: Sum or mean of x x^T over the inputs, float64; overwritten.
        pattern: Where zeros may be.
        sparsity: Share of the weights to zero: at least, for blocks as nearly as can be; not looked at for N:M.
        damping: What is added to the diagonal of H, as a fraction of its mean.
        held_OI: Zeros that stay, bool; they count among those that are chosen. None: none.
    """
    held_OI = torch.zeros_like(weight_OI, dtype=torch.bool) if held_OI is None else held_OI
    unfed_I = (hessian_II.diagonal() == 0).to(weight_OI.device)  # the factor overwrites H
    weight_OI, gone = weight_OI.masked_fill(unfed_I, 0), 0
    inputs = weight_OI.shape[1]
    factor_II = inverse_factor(hessian_II, damping)
    together = _together(pattern)
    stretch = together * max(1, STRETCH // together)
    for start in range(0, inputs, stretch):
        stop = min(start + stretch, inputs)
        factor_BI = factor_II[start:stop].to(weight_OI)
        left_OB, error_OB = weight_OI[:, start:stop], weight_OI.new_zeros(len(weight_OI), stop - start)
        diagonal_B = factor_BI[:, start:stop].diagonal()
        for j in range(stop - start):
            if j % together == 0:
                chosen, held_OC = slice(j, j + together), held_OI[:, start + j : start + j + together]
                scores_OC = (left_OB[:, chosen].abs() / diagonal_B[chosen]).masked_fill(held_OC, 0)  # updates have moved them away from 0
                if isinstance(pattern, Blocks):
                    strip = range(start + j, start + j + scores_OC.shape[1])
                    stays_ST = _stays(block_means(scores_OC, pattern), weight_OI.shape, strip, pattern, sparsity, gone)
                    kept_OC = spread(stays_ST, scores_OC.shape, pattern)
                    gone += int((~kept_OC).sum())
                else:
                    kept_OC = mask(scores_OC, pattern, sparsity)
                kept_OC = kept_OC & ~held_OC
            gone_O = left_OB[:, j].masked_fill(kept_OC[:, j % together], 0)
            error_OB[:, j] = gone_O / diagonal_B[j]
            left_OB[:, j + 1 :] -= error_OB[:, j, None] * factor_BI[j, start + j + 1 : stop]
            left_OB[:, j] = left_OB[:, j].masked_fill(~kept_OC[:, j % together], 0)  # not by subtraction, which leaves a rounding error
        weight_OI[:, stop:] -= error_OB @ factor_BI[:, stop:]
    return weight_OI


def _stays(scores_ST: Tensor, shape: tuple[int, int] | torch.Size, strip: range, pattern: Blocks, sparsity: float, gone: int) -> Tensor:
    """Returns which blocks of a strip of inputs stay, bool `[S, T]`, after `gone` weights of the inputs before."""
    outputs, inputs = shape
    zeros = num_zeros(sparsity, outputs * strip.stop) - gone
    may_empty = strip.stop < inputs or gone < outputs * strip.start
    return highest_blocks(scores_ST, (outputs, len(strip)), pattern, zeros, may_empty)


def reachable_by_strips(shape: tuple[int, int] | torch.Size, pattern: Blocks, sparsity: float) -> int:
    """Returns how many weights of a matrix go: a matter of its shape alone."""
    gone, together = 0, _together(pattern)
    for start in range(0, shape[1], together):
        strip = range(start, min(start + together, shape[1]))
        sizes_ST = block_sizes((shape[0], len(strip)), pattern)
        gone += int(sizes_ST[~_stays(torch.zeros(sizes_ST.shape), shape, strip, pattern, sparsity, gone)].sum())
    return gone


def _together(pattern: Pattern) -> int:
    """Returns for how many inputs the mask is chosen together."""
    match pattern:
        case NM():
            return pattern.group
        case Blocks():
            return pattern.columns * max(1, STRETCH // pattern.columns)
        case _:
            return STRETCH
