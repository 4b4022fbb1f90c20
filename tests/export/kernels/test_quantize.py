"""Quantize per tensor and per token: every code and every bit of a scale equals torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from export.kernels.quantize import quantize_tensor, quantize_token, reference_tensor, reference_token
from foundation.core.errors import InputError
from foundation.schemes.int8 import quantize, token_scale

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
    torch.testing.assert_close(codes, reference_tensor(x, scale), rtol=0, atol=0)
    torch.testing.assert_close(codes, quantize(x.float(), torch.tensor(scale), -128, 127), rtol=0, atol=0)


def test_ties_go_to_even_and_ends_saturate(interpreted: Interpreted) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 500.0, -127.5, -128.5, -500.0, 0.49999997]) / 4
    assert interpreted(quantize_tensor, x, 0.25).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128, -128, -128, 0]


@given(SHAPES, DTYPES, st.sampled_from([0.0, 1e-30, 1.0, 400.0]), st.integers(0, 999))
@settings(max_examples=20)
def test_per_token(interpreted: Interpreted, shape: tuple[int, ...], dtype: torch.dtype, size: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(shape) * size).to(dtype)
    codes, scale = interpreted(quantize_token, x)
    wanted, wanted_scale = reference_token(x)
    torch.testing.assert_close(codes, wanted, rtol=0, atol=0)
    torch.testing.assert_close(scale, wanted_scale, rtol=0, atol=0)
    torch.testing.assert_close(scale, token_scale(x.float()), rtol=0, atol=0)


def test_the_largest_value_may_be_in_any_block(interpreted: Interpreted) -> None:
    x = torch.ones(3, 4097)
    x[1, -1], x[2, 0] = -254.0, 508.0
    codes, scale = interpreted(quantize_token, x)
    assert scale.flatten().tolist() == [torch.tensor(1 / 127).item(), 2.0, 4.0]
    assert codes[:, -1].tolist() == [127, -127, 0]
    assert codes[1, :-1].unique().tolist() == [0]  # 0.5 goes to 0


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-50])
def test_scales_that_are_not_positive_are_refused(scale: float) -> None:
    with pytest.raises(InputError, match="positive number"):
        quantize_tensor(torch.ones(3), scale)


def test_other_tensors_are_refused() -> None:
    with pytest.raises(InputError, match="not contiguous"):
        quantize_token(torch.ones(3, 4).T)
    with pytest.raises(InputError, match="int8"):
        quantize_tensor(torch.ones(3, dtype=torch.int8), 1.0)


def test_no_rows(interpreted: Interpreted) -> None:
    assert interpreted(quantize_tensor, torch.ones(0, 4), 1.0).shape == (0, 4)
    assert interpreted(quantize_token, torch.ones(0, 4))[1].shape == (0, 1)
