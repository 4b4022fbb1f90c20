"""Pooling: within its bound of float64 for sequences of any lengths, with the same bits whatever lies next to a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu import references
from export.kernels.pooling import TILE_T, Weights
from tests.export.kernels.calls import pooled

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@given(
    st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 65, 100]), min_size=1, max_size=4),
    st.sampled_from([1, 63, 64, 65, 130]),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from(get_args(Weights)),
    st.sampled_from([0.0, 1000.0]),
    st.integers(0, 99),
)
@settings(max_examples=10)
@example([33, 0, 1, 64], 65, torch.float32, "weighted", 1000.0, 0)
@example([32, 65], 64, torch.float16, "mean", 0.0, 0)
def test_against_float64(
    interpreted: Interpreted, lengths: list[int], inputs: int, dtype: torch.dtype, weights: Weights, mean: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x, start = (torch.randn(sum(lengths), inputs) + mean).to(dtype), starts(lengths)
    found = interpreted(pooled, x, start, weights).double()
    exact = references.pooled(x, start, weights)
    for sequence, length in enumerate(lengths):
        largest = x[start[sequence] : start[sequence + 1]].double().abs().amax(dim=0) if length else torch.zeros(inputs)
        bound = (-(-length // TILE_T) + 36) * 2.0**-24 * largest
        assert ((found[sequence] - exact[sequence]).abs() <= bound).all(), length


@pytest.mark.parametrize("weights", get_args(Weights))
def test_neighbours_change_no_bit(interpreted: Interpreted, weights: Weights) -> None:
    x = torch.randn(90, 70)
    together = interpreted(pooled, x, starts([40, 50, 0]), weights)
    alone = [interpreted(pooled, part.contiguous(), starts([len(part)]), weights) for part in (x[:40], x[40:])]
    assert torch.equal(together[:2], torch.cat(alone))
    assert not together[2].any()


def test_weights_grow_by_one(interpreted: Interpreted) -> None:
    x = torch.eye(3)
    assert torch.equal(interpreted(pooled, x, starts([3]), "weighted"), torch.tensor([[1.0, 2.0, 3.0]]) / 6)
    assert torch.equal(interpreted(pooled, x, starts([3]), "mean"), torch.ones(1, 3) / 3)
