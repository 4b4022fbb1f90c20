"""SparseGPT: zeroes weights one input at a time and updates the weights of later inputs to compensate (Frantar and Alistarh 2023,
https://arxiv.org/abs/2301.00774, algorithm 1).

Every output minimizes (w - w') H (w - w')^T, with the same H = sum of x x^T. With H^-1 = U^T U (`foundation.core.inverse_factor`), inputs
j = 1, 2, ... are processed in turn. For each weight to be zeroed,

    e = w_j / U_jj,     w_k <- w_k - e U_jk   for k >= j        which makes w_j 0

The mask is chosen as late as the pattern allows, from the updated weights (adaptive mask selection, section 3.3):

    S_oi = w_oi^2 / U_ii^2       the error of zeroing it, after all later inputs compensate
    unstructured   for 128 inputs together, over all outputs        N:M   for each group of M inputs
    block R x C    for as many strips of C inputs as fit into 128

Updates are applied at once within a stretch of about 128 inputs, and to all later inputs at its end. The error of a block is approximated
by the sum over its weights; if whole blocks zero too many or too few weights in one strip, the next strips correct for it. Weights of
inputs that are always 0 have no effect and are zeroed first, as in the paper's code. Held zeros stay 0, and the other weights absorb their
updates. Not supported: choosing zeros and integers jointly; GPTQ keeps zeros instead.

Tensor names carry their shapes: O outputs, I inputs, B inputs of a stretch, C inputs masked together, S x T blocks of those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundation.core.inverse_factor import inverse_factor
from prune.sparsify.patterns import NM, Blocks, MatrixPattern, block_means, block_sizes, highest_blocks, mask, num_zeros, spread

DAMPING = 0.01
STRETCH = 128


def sparsegpt(
    weight_OI: Tensor,
    hessian_II: Tensor,
    pattern: MatrixPattern,
    sparsity: float,
    damping: float = DAMPING,
    held_OI: Tensor | None = None,
) -> Tensor:
    """Returns the weights with zeros in the pattern and the others updated, float32 `[O, I]`.

    Args:
        weight_OI: float32.
        hessian_II: Sum or mean of x x^T over the inputs, float64; overwritten.
        pattern: The sparsity pattern.
        sparsity: Share of the weights to zero: at least this for unstructured, the nearest for blocks; ignored for N:M.
        damping: Added to the diagonal of H, as a fraction of its mean.
        held_OI: Zeros that must stay, bool; they count towards the sparsity. None: there are none.
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
                scores_OC = (left_OB[:, chosen].abs() / diagonal_B[chosen]).masked_fill(held_OC, 0)  # updates may have changed held zeros
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
            left_OB[:, j] = left_OB[:, j].masked_fill(~kept_OC[:, j % together], 0)  # exact; subtraction would leave a rounding error
        weight_OI[:, stop:] -= error_OB @ factor_BI[:, stop:]
    return weight_OI


def _stays(scores_ST: Tensor, shape: tuple[int, int] | torch.Size, strip: range, pattern: Blocks, sparsity: float, gone: int) -> Tensor:
    """Returns which blocks of a strip of inputs stay, bool `[S, T]`; `gone` weights were zeroed in the strips before."""
    outputs, inputs = shape
    zeros = num_zeros(sparsity, outputs * strip.stop) - gone
    may_empty = strip.stop < inputs or gone < outputs * strip.start
    return highest_blocks(scores_ST, (outputs, len(strip)), pattern, zeros, may_empty)


def reachable_by_strips(shape: tuple[int, int] | torch.Size, pattern: Blocks, sparsity: float) -> int:
    """Returns how many weights of a matrix are zeroed; depends on its shape only."""
    gone, together = 0, _together(pattern)
    for start in range(0, shape[1], together):
        strip = range(start, min(start + together, shape[1]))
        sizes_ST = block_sizes((shape[0], len(strip)), pattern)
        gone += int(sizes_ST[~_stays(torch.zeros(sizes_ST.shape), shape, strip, pattern, sparsity, gone)].sum())
    return gone


def _together(pattern: MatrixPattern) -> int:
    """Returns how many inputs the mask is chosen for at once."""
    match pattern:
        case NM():
            return pattern.group
        case Blocks():
            return pattern.columns * max(1, STRETCH // pattern.columns)
        case _:
            return STRETCH
