"""Cross-layer equalization: balances the weight ranges of two consecutive linear layers.

Nagel et al. 2019, https://arxiv.org/abs/1906.04721, section 4.1. If output channel j of one layer is input channel j of another, with
nothing or a ReLU in between, then for any s_j > 0

    W2 relu(W1 x + b1) = (W2 S) relu(S^-1 W1 x + S^-1 b1),     s_j = sqrt(r1_j / r2_j)

with r1_j = max |W1[j, :]| and r2_j = max |W2[:, j]|, which makes both ranges sqrt(r1_j r2_j). No data is needed. Several consumers count as
one matrix. A layer may be first in one pair and second in another, so the pairs are iterated until the factors converge. `folding` finds
the pairs; GELU does not commute with a factor, so in most encoders only the pair of value and attention output remains.

With a weight scale per output channel the rows of W1 do not benefit; the columns of W2 and the tensor between the two layers do.

Not supported: absorbing large biases (section 4.1.3), which is for normalized convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quantize.folding import Fold, rescale

ROUNDS = 50
CONVERGED = 1e-3  # largest |log s| in a round that counts as converged
SMALLEST, LARGEST = 1e-5, 1e5  # limits of a factor: keep weights well inside the range of float32


def equalize(model: nn.Module, layers: Mapping[str, nn.Linear], folds: Sequence[Fold]) -> list[dict[str, object]]:
    """Equalizes the weight ranges of pairs of linear layers in place; the model computes the same afterwards, up to float rounding.

    Args:
        model: The float model.
        layers: The layers to quantize; pairs without any of them are skipped.
        folds: The result of `folding.find_folds`.

    Returns:
        For each pair `first`, `second` (one or more layers) and `spread_before`, `spread`: the largest range of a column of W2 over the
        smallest.
    """
    pairs = [
        fold
        for fold in folds
        if fold.blocked is None
        and isinstance(model.get_submodule(fold.producer), nn.Linear)
        and not layers.keys().isdisjoint(fold.consumers)
    ]
    before = [_spread(model, fold) for fold in pairs]
    for _ in range(ROUNDS):
        moved = [_equalize(model, fold) for fold in pairs]
        if not any(moved):
            break
    return [
        {"first": fold.producer, "second": list(fold.consumers), "spread_before": spread, "spread": _spread(model, fold)}
        for fold, spread in zip(pairs, before, strict=True)
    ]


def equalization_factor(first_C: Tensor, second_C: Tensor) -> Tensor:
    """Returns s, float32 [C]; 1 where a range is 0.

    Args:
        first_C: Range of each row of the first weight, float32 [C].
        second_C: Range of each column of the second, float32 [C].
    """
    factor_C = (first_C / second_C).sqrt().clamp(SMALLEST, LARGEST)
    return torch.where((first_C == 0) | (second_C == 0), torch.ones_like(factor_C), factor_C)


def _equalize(model: nn.Module, fold: Fold) -> bool:
    """Equalizes one pair; returns whether its factors were still above the convergence threshold."""
    first_C = model.get_submodule(fold.producer).get_parameter("weight").detach().abs().amax(dim=1)
    factor_C = equalization_factor(first_C, _columns(model, fold))
    rescale(model, fold, factor_C)
    return float(factor_C.log().abs().max()) > CONVERGED


def _columns(model: nn.Module, fold: Fold) -> Tensor:
    """Returns the range of each input channel over all consumers, float32 [C]."""
    ranges = [model.get_submodule(name).get_parameter("weight").detach().abs().amax(dim=0) for name in fold.consumers]
    return torch.stack(ranges).amax(dim=0)


def _spread(model: nn.Module, fold: Fold) -> float:
    """Returns the largest range of an input channel over the smallest one that is not 0."""
    range_C = _columns(model, fold)
    used_C = range_C[range_C > 0]
    return float(used_C.max() / used_C.min()) if len(used_C) else 1.0
