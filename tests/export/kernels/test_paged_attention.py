"""Attention to pages: within its bound of float64 at every edge of a page and a span, and the same bits on any pages and in any company."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from export.kernels.paged_attention import Pages
from foundation.core.errors import InputError
from tests.export.kernels.calls import attention_to_pages

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
SPAN = 64
"""Keys of a program in these tests."""


def paged(parts: list[tuple[Tensor, Tensor]], new: int, slots: int, pages: Tensor) -> Pages:
    """Puts keys and values [n, K, D] of sequences into pages that are taken in an order; the last `new` tokens of each are new."""
    shape = (len(pages), slots, *parts[0][0].shape[1:])
    keys, values = (torch.full(shape, math.nan, dtype=parts[0][0].dtype) for _ in range(2))
    width = max(-(-len(key) // slots) for key, _ in parts)
    table, sequence, length, free = torch.zeros(len(parts), width, dtype=torch.int32), [], [], iter(pages.tolist())
    for number, (key, value) in enumerate(parts):
        for at in range(len(key)):
            if at % slots == 0:
                table[number, at // slots] = next(free)
            for memory, part in ((keys, key), (values, value)):
                memory[table[number, at // slots], at % slots] = part[at]
        seen = range(max(1, len(key) - new + 1), len(key) + 1)
        sequence += [number] * len(seen)
        length += list(seen)
    return Pages(keys, values, table, torch.tensor(sequence, dtype=torch.int32), torch.tensor(length, dtype=torch.int32))


def exactly(q: Tensor, parts: list[tuple[Tensor, Tensor]], pages: Pages, scaling: float) -> Tensor:
    """Returns the outputs in float64: one new token and head after another, softmax of the whole row."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, (number, seen) in enumerate(zip(pages.sequence.tolist(), pages.length.tolist(), strict=True)):
        keys, values = (part[:seen].double() for part in parts[number])
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // keys.shape[1])
            out[row, head] = (keys[:, shared] @ q[row, head].double() * scaling).softmax(dim=0) @ values[:, shared]
    return out


def drawn(lengths: list[int], heads: tuple[int, int], dimension: int, dtype: torch.dtype, new: int) -> tuple[Tensor, Any]:
    parts = [(torch.randn(n, heads[1], dimension).to(dtype), torch.randn(n, heads[1], dimension).to(dtype)) for n in lengths]
    rows = sum(min(new, n) for n in lengths)
    return torch.randn(rows, heads[0], dimension).to(dtype), parts


def order(lengths: list[int], slots: int, seed: int) -> Tensor:
    return torch.randperm(sum(-(-n // slots) for n in lengths) + 1, generator=torch.Generator().manual_seed(seed))


LENGTHS = st.lists(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 128, 129]), min_size=1, max_size=3)


@pytest.mark.slow
@given(
    LENGTHS, st.sampled_from([(1, 1), (3, 1), (8, 1), (4, 2), (16, 2)]), st.sampled_from([32, 64, 96, 128]), st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 2]), st.sampled_from([torch.float16, torch.float32]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=6)
@example([1], (1, 1), 32, 16, 1, torch.float16, 0)
@example([64, 65, 129], (8, 1), 96, 16, 2, torch.float32, 0)
@example([16, 128], (3, 1), 64, 16, 1, torch.float16, 0)
def test_against_float64(
    interpreted: Interpreted, lengths: list[int], heads: tuple[int, int], dimension: int, slots: int, new: int, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    q, parts = drawn(lengths, heads, dimension, dtype, new)
    pages, scaling = paged(parts, new, slots, order(lengths, slots, seed)), dimension**-0.5
    found, exact = interpreted(attention_to_pages, q, pages, scaling, None, SPAN).double(), exactly(q, parts, pages, scaling)
    u, of_p, of_out = 2.0**-24, *((2.0**-20, 2.0**-24) if dtype == torch.float32 else (2.0**-10, 2.0**-11))
    for row, (number, seen) in enumerate(zip(pages.sequence.tolist(), pages.length.tolist(), strict=True)):
        keys, values = (part[:seen].double() for part in parts[number])
        for head in range(heads[0]):
            shared = head // (heads[0] // heads[1])
            largest = (keys[:, shared].abs() @ q[row, head].double().abs()).max() * scaling
            delta, spans = 2 * (dimension + 8) * u * largest, -(-seen // SPAN)
            bound = values[:, shared].abs().amax(dim=0) * (2 * delta + of_p + (seen + 4 * spans) * u)
            bound = bound + (of_out + spans * 2.0**-22) * exact[row, head].abs() + u
            assert ((found[row, head] - exact[row, head]).abs() <= bound).all()


@pytest.mark.slow
def test_any_pages_and_any_company_give_the_same_bits(interpreted: Interpreted) -> None:
    torch.manual_seed(0)
    lengths = [65, 3, 130]
    q, parts = drawn(lengths, (4, 2), 32, torch.float32, 1)
    first = interpreted(attention_to_pages, q, paged(parts, 1, 16, order(lengths, 16, 0)), 0.2, None, SPAN)
    for slots, seed in ((16, 1), (5, 2), (1, 3)):
        pages = paged(parts, 1, slots, order(lengths, slots, seed))
        assert torch.equal(interpreted(attention_to_pages, q, pages, 0.2, None, SPAN), first)
    for row in range(3):
        alone = paged(parts[row : row + 1], 1, 16, order(lengths[row : row + 1], 16, 4))
        assert torch.equal(interpreted(attention_to_pages, q[row : row + 1], alone, 0.2, None, SPAN)[0], first[row])


def test_later_keys_and_free_slots_are_not_read(interpreted: Interpreted) -> None:
    """Slots that nobody wrote hold NaN (`paged`); here what comes after the key of a token holds it too."""
    torch.manual_seed(0)
    q, parts = drawn([70], (2, 1), 32, torch.float32, 3)
    pages = paged(parts, 3, 16, order([70], 16, 0))
    before = interpreted(attention_to_pages, q, pages, 0.2, None, SPAN)
    assert before.isfinite().all()
    for memory in (pages.keys, pages.values):
        memory[pages.table[0, 4], 5] = math.nan  # key 69 of 70
    after = interpreted(attention_to_pages, q, pages, 0.2, None, SPAN)
    assert torch.equal(after[:2], before[:2])
    assert after[2].isnan().any()


@pytest.mark.parametrize("lengths", [[60], [129, 64]])
def test_outputs_are_quantized_where_a_scale_is_given(interpreted: Interpreted, lengths: list[int]) -> None:
    torch.manual_seed(0)
    q, parts = drawn(lengths, (2, 2), 32, torch.float32, 1)
    pages = paged(parts, 1, 16, order(lengths, 16, 0))
    floats = interpreted(attention_to_pages, q, pages, 0.2, None, SPAN)
    codes = interpreted(attention_to_pages, q, pages, 0.2, 0.01, SPAN)
    assert torch.equal(codes, torch.round(floats / torch.tensor(0.01)).clamp(-128, 127).to(torch.int8))


def test_wrong_scales_are_refused() -> None:
    q, parts = drawn([3], (1, 1), 32, torch.float32, 1)
    pages = paged(parts, 1, 16, torch.arange(2))
    with pytest.raises(InputError, match=r"scaling: 0.0 given"):
        attention_to_pages(q, pages, 0.0)
    with pytest.raises(InputError, match=r"scale of the output: -1.0 given"):
        attention_to_pages(q, pages, 1.0, -1.0)
