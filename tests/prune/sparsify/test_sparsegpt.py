"""SparseGPT: inputs that are always 0, zeros that are held, and the share of zeros over strips of blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prune.sparsify.patterns import NM, Blocks, Unstructured, block_sizes
from prune.sparsify.sparsegpt import reachable_by_strips, sparsegpt

pytestmark = pytest.mark.whole


def problem(outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns a weight and inputs of a layer, float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(2 * inputs, inputs, generator=generator)


def test_weights_of_inputs_that_are_always_zero_go_first() -> None:
    weight_OI, x_NI = problem(6, 16)
    x_NI *= 0.01  # with H_jj = 1 the unfed ones would be worth more than all others
    unfed = [3, 4, 9, 14]
    x_NI[:, unfed] = 0
    found = sparsegpt(weight_OI, (x_NI.T @ x_NI).double(), Unstructured(), 0.25)
    assert (found == 0).any(dim=0).nonzero().flatten().tolist() == unfed
    live = [i for i in range(16) if i not in unfed]
    assert torch.equal(found[:, live], weight_OI[:, live])  # nothing has to be made up for
    assert not sparsegpt(weight_OI, (x_NI.T @ x_NI).double(), NM(2, 4), 0.5)[:, unfed].any()


def test_held_zeros_stay_and_others_keep_their_share() -> None:
    weight_OI, x_NI = problem(8, 160)  # two stretches: the second is chosen when its zeros have moved
    x_NI = x_NI @ torch.randn(160, 160, generator=torch.Generator().manual_seed(1))  # inputs that can make up for each other
    hessian_II = (x_NI.T @ x_NI).double()
    first = sparsegpt(weight_OI, hessian_II.clone(), NM(2, 4), 0.5)
    again = sparsegpt(first, hessian_II.clone(), Unstructured(), 0.625, held_OI=first == 0)
    assert bool((again[first == 0] == 0).all())
    assert float((again == 0).float().mean()) == 0.625  # held ones count
    assert not bool((sparsegpt(first, hessian_II.clone(), Unstructured(), 0.625)[first == 0] == 0).all())
    assert torch.equal(sparsegpt(first, hessian_II.clone(), Unstructured(), 0.0, held_OI=first == 0), first)


@given(
    st.integers(1, 60),
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8, 0.9, 0.99]),
)
def test_the_share_over_all_strips(outputs: int, inputs: int, rows: int, columns: int, sparsity: float) -> None:
    """What one strip takes too much or too little the next ones make up for: as near as the blocks of the last strip let it."""
    pattern, weights = Blocks(rows, columns), outputs * inputs
    gone = reachable_by_strips((outputs, inputs), pattern, sparsity)
    assert gone < weights
    largest = int(block_sizes((outputs, inputs), pattern).max())
    assert abs(gone - sparsity * weights) <= largest


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("shape", "sparsity", "reached"),
    [((384, 1536), 0.5, 0.5), ((384, 1536), 0.8, 7 / 9), ((384, 384), 0.5, 5 / 9), ((100, 300), 0.9, 2 / 3)],
)
def test_blocks_that_are_cut_do_not_overshoot(shape: tuple[int, int], sparsity: float, reached: float) -> None:
    pattern = Blocks(256, 256) if shape[0] > 100 else Blocks(128, 100)
    weight_OI, x_NI = problem(*shape)
    found = sparsegpt(weight_OI, (x_NI.T @ x_NI).double(), pattern, sparsity)
    share = float((found == 0).double().mean())
    assert share == pytest.approx(reachable_by_strips(shape, pattern, sparsity) / weight_OI.numel())
    assert share == pytest.approx(reached)
