"""The factor that second-order methods sweep over inputs with: H^-1 = U^T U, U upper triangular.

Row j of U, divided by U_jj, is what Optimal Brain Surgeon takes from the inverse of H without the inputs before j when input j is settled:
one factorization holds the inverses of all of them (Frantar et al. 2022, https://arxiv.org/abs/2210.17323, section 3.3, step 3). GPTQ
(`quantize.gptq`) and SparseGPT (`prune.sparsify.sparsegpt`) both sweep with it.

    H <- H + damping * mean(diag H) * I       so that the inverse exists; an input that was always 0 gets H_jj = 1 first

Left out: a factor by parts, for a H that does not fit into memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_factor(hessian_II: Tensor, damping: float) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped H, float64 [I, I]; a float64 H is overwritten by it.

    Args:
        hessian_II: Positive semidefinite, float.
        damping: What is added to the diagonal, as a fraction of its mean.
    """
    factor_II = hessian_II.double().mT  # symmetric; LAPACK works in place on columns that lie one after the other
    diagonal_I = factor_II.diagonal()  # a view
    diagonal_I[diagonal_I == 0] = 1
    diagonal_I += damping * diagonal_I.mean()
    torch.linalg.cholesky(factor_II, out=factor_II)
    torch.cholesky_inverse(factor_II, out=factor_II)
    torch.linalg.cholesky(factor_II, upper=True, out=factor_II)
    return factor_II
