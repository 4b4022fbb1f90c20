"""Numbers of super-blocks: few bits, so that their multiples are float16 numbers.

python -m pytest tests/foundation/schemes/test_two_level.py
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.schemes.two_level import LARGEST_SHARED, SMALLEST_SHARED, are_two_level, in_super_blocks, integers, of_groups, shared


def neighbours(value: float) -> tuple[float, float]:
    """Returns the numbers of 5 significant bits around a value, none finer than the smallest number of float16."""
    quantum = max(2.0 ** (math.floor(math.log2(value)) - 4), 2.0**-24)
    return math.floor(value / quantum) * quantum, math.ceil(value / quantum) * quantum


@given(st.floats(2.0**-24, 2.0**10, width=32))
@settings(max_examples=300, deadline=None)
def test_numbers_next_to_a_value_have_multiples_in_float16(value: float) -> None:
    below, above = neighbours(value)
    found, raised = (float(shared(torch.tensor([value]), up=up)) for up in (False, True))
    assert found in (below, above)
    assert abs(found - value) <= (above - below) / 2
    assert raised == above
    for number in (found, raised):
        multiples = np.arange(64, dtype=np.float64) * number
        assert (multiples.astype(np.float16).astype(np.float64) == multiples).all()
    assert float(shared(torch.tensor([found]))) == found


def test_numbers_beyond_float16_are_its_ends() -> None:
    assert shared(torch.tensor([0.0, 1e-30, 1e30])).tolist() == [SMALLEST_SHARED, SMALLEST_SHARED, LARGEST_SHARED]


@pytest.mark.parametrize("groups", [1, 7, 8, 9, 18])
def test_eight_groups_share_a_number(groups: int) -> None:
    numbers = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])[:, : -(-groups // 8)]
    expanded = of_groups(numbers, groups)
    assert expanded.tolist() == [[float(numbers[row, group // 8]) for group in range(groups)] for row in range(2)]
    blocks = in_super_blocks(expanded, filler=-1.0)
    assert blocks.flatten(1)[:, :groups].equal(expanded)
    assert (blocks.flatten(1)[:, groups:] == -1).all()
    code = torch.arange(2 * groups).reshape(2, groups) % 63 + 1
    assert torch.equal(integers(code * expanded, numbers), code.to(torch.int32))
    assert are_two_level(code * expanded, numbers, smallest=1)


@pytest.mark.parametrize(
    ("code", "number", "smallest"),
    [(0, 1.0, 1), (64, 1.0, 1), (2.5, 1.0, 1), (1, 33 / 32, 1), (1, -1.0, 1), (1, math.nan, 1), (1, math.inf, 1), (-1, 1.0, 0)],
)
def test_other_numbers_are_no_two_level_numbers(code: float, number: float, smallest: int) -> None:
    numbers = torch.tensor([[number]])
    assert not are_two_level(torch.tensor([[code, 1.0]]) * numbers, numbers, smallest)
    assert are_two_level(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0]]), smallest=0)
    assert not are_two_level(torch.ones(1, 9), torch.ones(1, 1), smallest=1)  # of another number of super-blocks
