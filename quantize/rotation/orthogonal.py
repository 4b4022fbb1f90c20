"""Orthogonal matrices that spread a vector evenly over its entries: randomized Hadamard matrices, as products of small factors.

    R = diag(s) (F_1 x F_2 x ...)        s random signs, x the Kronecker product, F orthogonal

A Hadamard matrix H has entries of +1 and -1 and H H^T = n I. Divided by sqrt(n), it turns one large entry of a vector into n entries of
1 / sqrt(n) of its size. The signs keep a sum of several large entries from meeting in one channel. A size n is divided as follows:

    n = 2^k                 Sylvester: H_2 x H_2 x ...
    n = 2^k m, m odd        H of 2^j m by Paley (1933), j >= 2 as small as possible, times Sylvester's of 2^(k-j): 576 = 16 x 36
    no such j               a random orthogonal matrix of m, times Sylvester's of 2^k; of a prime size nothing else is left

Paley: with q prime and chi the quadratic character mod q, Q_ij = chi(i - j) gives Hadamard matrices of the sizes q + 1 (q = 3 mod 4) and
2 (q + 1) (q = 1 mod 4). Powers of primes are left out: 52 and 100 take a random factor of 13 and 25.

Norms that subtract the mean (LayerNorm) commute with R only if it maps the vector of ones to itself. Then R is a random orthogonal
matrix of the vectors whose entries add up to 0, and the identity on the vector of ones.

QuaRot (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456) randomizes the same way; it downloads its Hadamard matrices of other sizes.

Tensor names carry their shapes: D channels, N any number of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_FACTOR = 64
"""Sylvester's matrices are divided into factors of this size: a product by each costs as many operations as its size for each entry."""


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix R."""

    signs_D: Tensor
    """s, float64 [D], +1 and -1."""
    factors: tuple[Tensor, ...]
    """F_1, F_2, ...: float64, square; the product of their sizes is D."""

    @property
    def size(self) -> int:
        """D."""
        return len(self.signs_D)

    def of(self, x_ND: Tensor) -> Tensor:
        """Returns x R, float64 [N, D].

        Args:
            x_ND: float64 [N, D], on any device.
        """
        turned = (x_ND * self.signs_D.to(x_ND.device)).reshape(len(x_ND), *(len(factor) for factor in self.factors))
        for place, factor in enumerate(self.factors, 1):
            turned = torch.tensordot(turned, factor.to(x_ND.device), dims=([place], [0])).movedim(-1, place)
        return turned.reshape(len(x_ND), self.size)

    @property
    def matrix_DD(self) -> Tensor:
        """R, float64 [D, D]."""
        return self.of(torch.eye(self.size, dtype=torch.float64))


def randomized_hadamard(size: int, generator: torch.Generator) -> Rotation:
    """Returns a randomized Hadamard matrix of a size, or the nearest to one (see above)."""
    signs_D = torch.randint(2, (size,), generator=generator).double() * 2 - 1
    return Rotation(signs_D, tuple(_factors(size, generator)))


def mean_preserving(size: int, generator: torch.Generator) -> Rotation:
    """Returns a random rotation that maps the vector of ones to itself, so that the mean of a vector is the mean of its image."""
    if size == 1:
        return Rotation(torch.ones(1, dtype=torch.float64), (torch.ones(1, 1, dtype=torch.float64),))
    # columns: an orthonormal basis that begins with the vector of ones
    basis_DD = torch.linalg.qr(torch.cat([torch.ones(size, 1, dtype=torch.float64), torch.eye(size, dtype=torch.float64)[:, 1:]], dim=1)).Q
    inner_DD = torch.eye(size, dtype=torch.float64)
    inner_DD[1:, 1:] = random_orthogonal(size - 1, generator)
    return Rotation(torch.ones(size, dtype=torch.float64), (basis_DD @ inner_DD @ basis_DD.T,))


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """Returns a matrix drawn evenly from all orthogonal ones (Haar), float64 `[size, size]`."""
    drawn = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    signs: Tensor = torch.where(drawn.R.diagonal() < 0, -1.0, 1.0)
    orthogonal: Tensor = drawn.Q * signs
    return orthogonal


def hadamard(size: int) -> Tensor | None:
    """Returns a Hadamard matrix whose size is a power of two, or Paley's with a prime: float64, +1 and -1. None for other sizes."""
    if size & (size - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.kron(matrix, torch.tensor([[1, 1], [1, -1]], dtype=torch.float64))
        return matrix
    if size % 4 == 0:
        if _is_prime(size - 1):
            return _paley_one(size - 1)
        if _is_prime(size // 2 - 1) and (size // 2 - 1) % 4 == 1:
            return _paley_two(size // 2 - 1)
    return None


def _factors(size: int, generator: torch.Generator) -> list[Tensor]:
    odd = size // (size & -size)
    known = _odd_part(size, odd)
    first = random_orthogonal(odd, generator) if known is None else known / len(known) ** 0.5
    rest = size // len(first)
    parts: list[Tensor] = [first] if len(first) > 1 or rest == 1 else []
    while rest > 1:
        part = min(rest, LARGEST_FACTOR)
        found = hadamard(part)
        assert found is not None, part
        parts.append(found / part**0.5)
        rest //= part
    return parts


def _odd_part(size: int, odd: int) -> Tensor | None:
    """Returns the smallest Hadamard matrix whose size holds the odd part of a size and divides that size; None if no form is known."""
    if odd == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    candidates = (odd * 2**power for power in range(2, 64) if size % (odd * 2**power) == 0)
    return next((found for candidate in candidates if (found := hadamard(candidate)) is not None), None)


def _paley_one(q: int) -> Tensor:
    """I + [[0, 1], [-1, Q]], of size q + 1; q = 3 mod 4."""
    matrix = torch.eye(q + 1, dtype=torch.float64)
    matrix[0, 1:] += 1
    matrix[1:, 0] -= 1
    matrix[1:, 1:] += _jacobsthal(q)
    return matrix


def _paley_two(q: int) -> Tensor:
    """C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]] with C = [[0, 1], [1, Q]], of size 2 (q + 1); q = 1 mod 4."""
    conference = torch.ones(q + 1, q + 1, dtype=torch.float64)
    conference[0, 0] = 0
    conference[1:, 1:] = _jacobsthal(q)
    beside = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    within = torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64)
    return torch.kron(conference, beside) + torch.kron(torch.eye(q + 1, dtype=torch.float64), within)


def _jacobsthal(q: int) -> Tensor:
    """Q, float64 [q, q]: 0 on the diagonal, +1 where i - j is a square mod q, else -1."""
    squares = {number * number % q for number in range(1, q)}
    character = torch.tensor([0] + [1 if number in squares else -1 for number in range(1, q)], dtype=torch.float64)
    indices = torch.arange(q)
    return character[(indices[:, None] - indices[None, :]) % q]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
