"""Quantize per tensor and per token: every code and scale equals torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foundation.core.errors import InputError
from foundation.schemes.int8 import quantize, token_scale
from tests.export.kernels.calls import quantize_tensor, quantize_tokens

Interpreted = Callable[..., Any]
SHAPES = st.one_of(
    st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 31, 32, 33, 127, 129, 1000, 1023, 1025, 4095, 4097])),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 70)),
)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@given(SHAPES, DTYPES, st.sampled_from([2.0**-63, 1e-3, 0.05, 0.1, 1.0, 3.7e4]), st.integers(0, 999))
@settings(max_examples=20)
@example((4, 768), torch.float32, 0.05, 0)
def test_per_tensor(interpreted: Interpreted, shape: tuple[int, ...], dtype: torch.dtype, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(shape) * 80 * scale).clamp(-60000, 60000).to(dtype)  # some saturate
    codes = interpreted(quantize_tensor, x, scale)
    torch.testing.assert_close(codes, quantize(x.float(), torch.tensor(scale), -128, 127), rtol=0, atol=0)


def test_ties_go_to_even_and_ends_saturate(interpreted: Interpreted) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 500.0, -127.5, -128.5, -500.0, 0.49999997]) / 4
    assert interpreted(quantize_tensor, x, 0.25).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128, -128, -128, 0]


def test_no_rows(interpreted: Interpreted) -> None:
    assert interpreted(quantize_tensor, torch.ones(0, 4), 1.0).shape == (0, 4)


@given(st.integers(1, 5), st.sampled_from([1, 2, 33, 64, 129, 1000]), DTYPES, st.integers(0, 999))
@settings(max_examples=10)
@example(2, 64, torch.float32, 0)
def test_per_token(interpreted: Interpreted, rows: int, inputs: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(rows, inputs) * 10.0 ** torch.randint(-3, 4, (rows, 1))).to(dtype)
    x[0] = 0
    codes, scales = interpreted(quantize_tokens, x)
    wanted = token_scale(x.float())
    torch.testing.assert_close(scales, wanted, rtol=0, atol=0)
    torch.testing.assert_close(codes, quantize(x.float(), wanted, -127, 127), rtol=0, atol=0)


def test_rows_that_are_too_long_are_refused() -> None:
    with pytest.raises(InputError, match="x: 16385 inputs given; rows have 1 to 16384"):
        quantize_tokens(torch.ones(1, 16385))
