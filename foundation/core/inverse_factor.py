"""Cholesky factor of the inverse Hessian, for second-order methods: H^-1 = U^T U with U upper triangular.

GPTQ (`quantize.rounding.gptq`) and SparseGPT (`prune.sparsify.sparsegpt`) process the inputs of a layer one after the other. For input j,
the Optimal Brain Surgeon update needs the first row of the inverse of H[j:, j:], divided by its diagonal entry. That is row j of U divided
by U_jj, so one factorization replaces an inversion per input (Frantar et al. 2022, https://arxiv.org/abs/2210.17323, section 3.3, step 3).

    H <- H + damping * mean(diag H) * I       makes H invertible; an input that was always 0 first gets H_jj = 1

Not supported: a blockwise factorization, for an H that does not fit into memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_factor(hessian_II: Tensor, damping: float) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped H, float64 [I, I]. A float64 H is overwritten.

    Args:
        hessian_II: H, float [I, I], positive semidefinite.
        damping: Added to the diagonal, as a fraction of its mean.
    """
    factor_II = hessian_II.double().mT  # H is symmetric; column-major layout lets LAPACK work in place
    diagonal_I = factor_II.diagonal()  # a view
    diagonal_I[diagonal_I == 0] = 1
    diagonal_I += damping * diagonal_I.mean()
    torch.linalg.cholesky(factor_II, out=factor_II)
    torch.cholesky_inverse(factor_II, out=factor_II)
    torch.linalg.cholesky(factor_II, upper=True, out=factor_II)
    return factor_II
