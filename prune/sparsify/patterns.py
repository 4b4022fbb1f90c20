"""Sparsity patterns, and the masks that follow one: which weights stay, given their scores.

    unstructured   the highest scores, of the whole matrix or per output
    N:M            at most N of every M consecutive inputs of an output; NVIDIA's sparse tensor cores multiply 2:4 (Mishra et al. 2021,
                   https://arxiv.org/abs/2104.08378). An incomplete last group also keeps up to N
    slices of K    whole heads and K neurons at a time, in all matrices that read or write them (`prune.sparsify.slices`)
    block R x C    whole blocks of R outputs and C inputs, as in Li et al. 2020, https://arxiv.org/abs/2009.08065. Blocks start at the first
                   row and column, so blocks at the right and bottom edges may be smaller; a block's score is a mean over its weights, so
                   that small blocks are not at a disadvantage

With sparsity s of n weights, unstructured masks zero the fewest weights that make s n zeros or more, block masks the number nearest to s n;
N:M determines its own number. Below s = 1 at least one weight stays. Ties (between blocks of equal size) keep the first. Blocks have up to
four sizes: full, cut at the right, cut at the bottom, corner. Among blocks of one size the lowest scores go, so four counts decide:

    choose the four counts with   | sum of n size - s n | smallest,   then   sum of score * size smallest

Not supported: permuting inputs to make N:M cheaper; balancing an unstructured mask over groups of outputs (only per single output).

Tensor names carry their shapes: O outputs, I inputs, S x T blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Unstructured:
    """Zeros anywhere."""

    def __str__(self) -> str:
        return "unstructured"


@dataclass(frozen=True)
class NM:
    """At most `kept` of every `group` consecutive inputs."""

    kept: int
    group: int

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"


@dataclass(frozen=True)
class Blocks:
    """Blocks of `rows` outputs and `columns` inputs."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"block {self.rows} x {self.columns}"


@dataclass(frozen=True)
class Slices:
    """Whole heads, and `lines` neurons that follow one another, in all matrices that read or write them (`prune.sparsify.slices`)."""

    lines: int

    def __str__(self) -> str:
        return f"slices of {self.lines}"


MatrixPattern = Unstructured | NM | Blocks
"""Patterns that each matrix follows by itself."""
Pattern = MatrixPattern | Slices


def mask(scores_OI: Tensor, pattern: MatrixPattern, sparsity: float, by_output: bool = False) -> Tensor:
    """Returns which weights stay, bool `[O, I]`.

    Args:
        scores_OI: Score of each weight, float without NaN. The score of a block is the mean of the squares.
        pattern: The sparsity pattern.
        sparsity: Share of the weights to zero: at least this for unstructured, the nearest for blocks; ignored for N:M.
        by_output: Whether each output has this sparsity on its own; for unstructured masks.
    """
    match pattern:
        case Unstructured():
            rows_RN = scores_OI if by_output else scores_OI.reshape(1, -1)
            return highest(rows_RN, rows_RN.shape[1] - num_zeros(sparsity, rows_RN.shape[1])).reshape(scores_OI.shape)
        case NM():
            outputs, inputs = scores_OI.shape
            padded = functional.pad(scores_OI, (0, -inputs % pattern.group), value=-math.inf)
            return highest(padded.reshape(-1, pattern.group), pattern.kept).reshape(outputs, -1)[:, :inputs]
        case Blocks():
            stays_ST = highest_blocks(block_means(scores_OI, pattern), scores_OI.shape, pattern, num_zeros(sparsity, scores_OI.numel()))
            return spread(stays_ST, scores_OI.shape, pattern)


def num_zeros(sparsity: float, number: int) -> int:
    """Returns how many of `number` items to zero: the fewest that make up the share `sparsity`, but below 1 never all of them."""
    most = number - 1 if sparsity < 1 else number
    return max(0, min(most, math.ceil(sparsity * number - 1e-9)))  # in floating point, 0.1 * 30 is slightly more than 3


def highest(scores_RN: Tensor, count: int) -> Tensor:
    """Marks the `count` highest scores of each row, bool `[R, N]`; ties go to the first."""
    number = scores_RN.shape[1]
    if count <= 0 or count >= number:
        return torch.full(scores_RN.shape, count > 0, device=scores_RN.device)
    limit_R1 = _nth_lowest(scores_RN, number - count)
    at_least_RN = scores_RN >= limit_R1
    if int(at_least_RN.count_nonzero()) == count * len(scores_RN):  # no ties: skip the slow part
        return at_least_RN
    above_RN, equal_RN = scores_RN > limit_R1, scores_RN == limit_R1
    return above_RN | (equal_RN & (equal_RN.cumsum(dim=1) <= count - above_RN.sum(dim=1, keepdim=True)))


def _nth_lowest(scores_RN: Tensor, n: int) -> Tensor:
    """Returns the n-th lowest score of each row, counted from 0, `[R, 1]`."""
    if scores_RN.is_cpu:  # NumPy's selection is several times as fast
        return torch.from_numpy(np.partition(scores_RN.detach().numpy(), n, axis=1)[:, n : n + 1])
    return scores_RN.kthvalue(n + 1, dim=1, keepdim=True).values


def highest_blocks(scores_ST: Tensor, shape: tuple[int, int] | torch.Size, pattern: Blocks, zeros: int, may_empty: bool = False) -> Tensor:
    """Returns which blocks stay, bool `[S, T]`.

    Args:
        scores_ST: Score of each block, float without NaN.
        shape: Shape of the matrix, (O, I).
        pattern: The blocks.
        zeros: Number of weights to zero; the nearest reachable number is zeroed, the larger of two equally near.
        may_empty: Whether all blocks may be zeroed.
    """
    rows, columns = shape[0] // pattern.rows, shape[1] // pattern.columns  # of full blocks
    stays_ST = torch.ones_like(scores_ST, dtype=torch.bool)
    scores, sizes = scores_ST.double(), block_sizes(shape, pattern)
    kinds = [(s, t) for s in (slice(0, rows), slice(rows, None)) for t in (slice(0, columns), slice(columns, None))]
    orders, costs, weights = [], [], []
    for kind in kinds:  # lowest score first; of ties the last first
        orders.append(scores[kind].flatten().argsort(descending=True, stable=True).flip(0))
        size = int(sizes[kind].flatten()[:1].sum())  # 0 if there is no such block
        costs.append(size * functional.pad(scores[kind].flatten()[orders[-1]].cumsum(0), (1, 0)))
        weights.append(size * torch.arange(len(costs[-1]), device=scores.device))
    cut, cost = (_outer_sum(*values[1:]) for values in (weights, costs))  # for each choice of the three counts of edge blocks
    fits = ((zeros - cut) // (pattern.rows * pattern.columns)).clamp(0, rows * columns)
    whole = torch.stack([fits, (fits + 1).clamp(max=rows * columns)])  # nearest count of full blocks from below and from above
    total = cut + weights[0][whole]
    missed = 2 * (total - zeros).abs() + (total < zeros)
    if not may_empty:
        missed.masked_fill_(total == shape[0] * shape[1], torch.iinfo(torch.int64).max)
    best = (missed == missed.min()).nonzero()  # [n, 4]: below or above, and the three counts of edge blocks
    chosen = best[(cost + costs[0][whole])[tuple(best.T)].argmin()]
    numbers = [int(whole[tuple(chosen)]), *chosen[1:].tolist()]
    for kind, order, number in zip(kinds, orders, numbers, strict=True):
        part = stays_ST[kind]
        gone = torch.zeros(part.numel(), dtype=torch.bool, device=part.device)
        gone[order[:number]] = True
        part &= ~gone.reshape(part.shape)
    return stays_ST


def _outer_sum(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns the sums of all combinations of one entry each, `[A, B, C]`."""
    return a[:, None, None] + b[:, None] + c


def reachable(shape: tuple[int, int] | torch.Size, pattern: Blocks, sparsity: float) -> int:
    """Returns how many weights of a matrix are zeroed in whole blocks; depends on its shape only."""
    sizes_ST = block_sizes(shape, pattern)
    stays_ST = highest_blocks(torch.zeros(sizes_ST.shape), shape, pattern, num_zeros(sparsity, shape[0] * shape[1]))
    return int(sizes_ST[~stays_ST].sum())


def block_means(scores_OI: Tensor, pattern: Blocks) -> Tensor:
    """Returns the mean of the squares in each block, float64 `[S, T]`."""
    return block_sums(scores_OI.double().square(), pattern) / block_sizes(scores_OI.shape, pattern).to(scores_OI.device)


def block_sums(values_OI: Tensor, pattern: Blocks) -> Tensor:
    """Returns the sum over each block, `[S, T]`."""
    outputs, inputs = values_OI.shape
    padded = functional.pad(values_OI, (0, -inputs % pattern.columns, 0, -outputs % pattern.rows))
    strips, columns = padded.shape[0] // pattern.rows, padded.shape[1] // pattern.columns
    return padded.reshape(strips, pattern.rows, columns, pattern.columns).sum(dim=(1, 3))


def block_sizes(shape: tuple[int, int] | torch.Size, pattern: Blocks) -> Tensor:
    """Returns the number of weights of each block, int64 `[S, T]`."""
    rows, columns = (
        torch.arange(0, length, size).neg().add(length).clamp(max=size)
        for length, size in zip(shape, (pattern.rows, pattern.columns), strict=True)
    )
    return torch.outer(rows, columns)


def spread(values_ST: Tensor, shape: tuple[int, int] | torch.Size, pattern: Blocks) -> Tensor:
    """Repeats a value per block for each weight of the block, `[O, I]`."""
    return values_ST.repeat_interleave(pattern.rows, 0)[: shape[0]].repeat_interleave(pattern.columns, 1)[:, : shape[1]]
