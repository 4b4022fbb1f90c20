"""Patterns of zeros inside a matrix, and the masks that follow one: which weights stay, by their scores.

    unstructured   the highest scores, of the whole matrix or of each output by itself
    N:M            of every M consecutive inputs of an output at most N: 2:4 is what NVIDIA's sparse tensor cores multiply (Mishra et al.
                   2021, https://arxiv.org/abs/2104.08378). A last group of fewer than M inputs keeps N as well, or all where it has no more
    block R x C    whole blocks of R outputs and C inputs, as in Li et al. 2020, https://arxiv.org/abs/2009.08065. The matrix is cut from
                   its first row and column on, so that the last blocks may be smaller; scores of blocks are means over their weights, so
                   that a small block is not worth less

With a sparsity s of n weights as few go as make s n zeros or more; N:M says itself how many. Of equal scores the first ones stay. Left out:
permutations of inputs that make N:M cost less; balance between the outputs of an unstructured mask other than one by one.

Tensor names carry their shapes: O outputs, I inputs, S x T blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


Pattern = Unstructured | NM | Blocks


def mask(scores_OI: Tensor, pattern: Pattern, sparsity: float, by_output: bool = False) -> Tensor:
    """Returns which weights stay, bool `[O, I]`.

    Args:
        scores_OI: What each weight is worth, float without NaN. A block is worth the mean of the squares.
        pattern: Where zeros may be.
        sparsity: Share of the weights to zero, at least; not looked at for N:M.
        by_output: Whether each output loses that share by itself; for an unstructured mask.
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
            means_ST = block_sums(scores_OI.double().square(), pattern) / block_sizes(scores_OI.shape, pattern).to(scores_OI.device)
            return spread(highest_blocks(means_ST, scores_OI.shape, pattern, sparsity), scores_OI.shape, pattern)


def num_zeros(sparsity: float, number: int) -> int:
    """Returns how many of a number of things go: the fewest that are the share `sparsity` of them or more."""
    return min(number, math.ceil(sparsity * number - 1e-9))  # 0.1 * 30 is more than 3 in floating point


def highest(scores_RN: Tensor, count: int) -> Tensor:
    """Returns the `count` highest scores of each row, the first of equals, bool `[R, N]`."""
    number = scores_RN.shape[1]
    if count <= 0 or count >= number:
        return torch.full(scores_RN.shape, count > 0, device=scores_RN.device)
    limit_R1 = scores_RN.kthvalue(number - count + 1, dim=1, keepdim=True).values  # one pass; sorting all would take several times as long
    above_RN, equal_RN = scores_RN > limit_R1, scores_RN == limit_R1
    return above_RN | (equal_RN & (equal_RN.cumsum(dim=1) <= count - above_RN.sum(dim=1, keepdim=True)))


def highest_blocks(scores_ST: Tensor, shape: tuple[int, int] | torch.Size, pattern: Blocks, sparsity: float) -> Tensor:
    """Returns which blocks stay, bool `[S, T]`: the lowest go, the last of equals first, until enough weights are gone.

    Args:
        scores_ST: What each block is worth, float without NaN.
        shape: Of the matrix, (O, I).
        pattern: The blocks.
        sparsity: Share of the weights to zero, at least.
    """
    order = scores_ST.flatten().argsort(descending=True, stable=True).flip(0)
    gone = block_sizes(shape, pattern).to(order.device).flatten()[order].cumsum(0)
    target = num_zeros(sparsity, shape[0] * shape[1])
    kept = torch.ones(scores_ST.numel(), dtype=torch.bool, device=order.device)
    kept[order[: int((gone < target).sum()) + 1 if target else 0]] = False
    return kept.reshape(scores_ST.shape)


def block_sums(values_OI: Tensor, pattern: Blocks) -> Tensor:
    """Returns the sum over each block `[S, T]`."""
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
    """Returns what is said of blocks for each of their weights `[O, I]`."""
    return values_ST.repeat_interleave(pattern.rows, 0)[: shape[0]].repeat_interleave(pattern.columns, 1)[:, : shape[1]]
