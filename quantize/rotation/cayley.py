"""Descent over orthogonal matrices: steps along curves that never leave them, by the Cayley transform.

For a loss L(R) with the gradient G = dL / dR (entry by entry, as if R were any matrix), the skew-symmetric

    A = G R^T - R G^T

is the direction of steepest ascent among rotations from the left: L(exp(t A) R) grows by |A|^2 / 2 for each t. A step is

    R <- (I + t A / 2)^-1 (I - t A / 2) R          orthogonal for every t; equal to exp(-t A) R up to t^3

M <- momentum M + A takes the place of A. The step t is chosen so that the planes of R turn by `angle` radians in the mean of squares:

    t = angle sqrt(D) / |M|                        |M| the Frobenius norm; D the size

so that the size of the loss does not matter, and `angle` may decay to 0. Rotations that keep the vector of ones (norms that subtract the
mean need them, `orthogonal.mean_preserving`) are left by no step if A is projected to A 1 = 0.

Li, Li, Todorovic 2020, "Efficient Riemannian optimization on the Stiefel manifold via the Cayley transform",
https://arxiv.org/abs/2002.01113. They iterate to a step's result, as their matrices need not be square; here the linear system is solved in
float64. They bound t by the inverse norm of A; here it always is a multiple of it, as codes give a loss whose size says little.

Tensor names carry their shapes: D the size of the matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MOMENTUM = 0.9


class CayleySgd:
    """Stochastic gradient descent over an orthogonal matrix, with momentum.

    Args:
        start_DD: Orthogonal, float64.
        keeps_ones: Whether the matrix maps the vector of ones to itself, and always shall.
    """

    def __init__(self, start_DD: Tensor, *, keeps_ones: bool = False) -> None:
        self.matrix_DD = start_DD.clone()
        self._keeps_ones = keeps_ones
        self._momentum_DD = torch.zeros_like(start_DD)

    def step(self, gradient_DD: Tensor, angle: float) -> None:
        """Takes a step against a gradient, float of any dtype; turns by `angle` radians in the mean of squares. No step for a gradient
        of 0."""
        direction_DD = generator(self.matrix_DD, gradient_DD.double())
        if self._keeps_ones:
            direction_DD = without_ones(direction_DD)
        self._momentum_DD = MOMENTUM * self._momentum_DD + direction_DD
        norm = float(self._momentum_DD.norm())
        if norm > 0:
            self.matrix_DD = cayley(self.matrix_DD, self._momentum_DD, angle * math.sqrt(len(self.matrix_DD)) / norm)


def generator(matrix_DD: Tensor, gradient_DD: Tensor) -> Tensor:
    """Returns A: skew-symmetric, the direction of steepest ascent among rotations of an orthogonal matrix."""
    product_DD = gradient_DD @ matrix_DD.T
    return product_DD - product_DD.T


def without_ones(skew_DD: Tensor) -> Tensor:
    """Returns the nearest skew-symmetric matrix that maps the vector of ones to 0."""
    centred_DD = skew_DD - skew_DD.mean(dim=1, keepdim=True)
    return centred_DD - centred_DD.mean(dim=0, keepdim=True)


def cayley(matrix_DD: Tensor, skew_DD: Tensor, step: float) -> Tensor:
    """Returns (I + t A / 2)^-1 (I - t A / 2) R for an orthogonal R, a skew-symmetric A and a step t, all float64 [D, D]."""
    half_DD = 0.5 * step * skew_DD
    unit_DD = torch.eye(len(matrix_DD), dtype=matrix_DD.dtype, device=matrix_DD.device)
    moved: Tensor = torch.linalg.solve(unit_DD + half_DD, matrix_DD - half_DD @ matrix_DD)
    return moved


def nearest_orthogonal(matrix_DD: Tensor) -> Tensor:
    """Returns the orthogonal matrix with the least squared distance, float64: U V^T of the singular value decomposition U S V^T."""
    left_DD, _, right_DD = torch.linalg.svd(matrix_DD.double())
    nearest: Tensor = left_DD @ right_DD
    return nearest
