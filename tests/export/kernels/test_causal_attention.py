"""Causal attention over packed rows: later tokens change no bit of earlier ones, and tiles of keys behind the diagonal are not read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from export.kernels.attention import Scores
from tests.export.kernels.calls import packed_attention

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
HEADS = ((1, 1), (3, 1), (8, 1))
"""Heads of queries and of keys: groups of one, three and eight."""


def drawn(tokens: int, heads: tuple[int, int], dimension: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(tokens, count, dimension).to(dtype) for count in (heads[0], heads[1], heads[1])]


def start_of(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.first(1)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("dimension", "dtype"), [(32, torch.float32), (96, torch.float16)])
def test_later_tokens_change_no_bit(interpreted: Interpreted, heads: tuple[int, int], dimension: int, dtype: torch.dtype) -> None:
    """32 and 64 rows are whole tiles of float32 and float16."""
    torch.manual_seed(0)
    scores = Scores(dimension**-0.5, causal=True)
    q, k, v = drawn(66, heads, dimension, dtype)
    whole = interpreted(packed_attention, q, k, v, start_of(66), scores)
    for length in (1, 31, 64, 65):
        shorter = interpreted(packed_attention, q[:length], k[:length], v[:length], start_of(length), scores)
        assert torch.equal(shorter, whole[:length]), length


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tiles_behind_the_diagonal_are_not_read(interpreted: Interpreted, dtype: torch.dtype) -> None:
    """A tile that is read and masked turns a value that is no number into one of the output, as 0 times it is none."""
    torch.manual_seed(0)
    q, k, v = drawn(300, (2, 1), 32, dtype)
    tile = 32 if dtype == torch.float32 else 128  # rows of a program, here
    before = interpreted(packed_attention, q, k, v, start_of(300), Scores(0.2, causal=True))
    for rows in (tile, 2 * tile):
        spoilt = v.clone()
        spoilt[rows:] = math.nan
        after = interpreted(packed_attention, q, k, spoilt, start_of(300), Scores(0.2, causal=True))
        assert torch.equal(after[:rows], before[:rows])
        assert after[rows:].isnan().all()


@pytest.mark.slow
def test_neighbours_change_no_bit(interpreted: Interpreted) -> None:
    torch.manual_seed(0)
    scores, lengths = Scores(0.2, causal=True), (33, 1, 64)
    parts = [drawn(length, (4, 2), 32, torch.float32) for length in lengths]
    alone = [interpreted(packed_attention, *part, start_of(length), scores) for part, length in zip(parts, lengths, strict=True)]
    for order in ((0, 1, 2), (2, 0, 1)):
        q, k, v = (torch.cat([parts[at][which] for at in order]) for which in range(3))
        together = interpreted(packed_attention, q, k, v, start_of(*(lengths[at] for at in order)), scores)
        assert torch.equal(together, torch.cat([alone[at] for at in order]))
