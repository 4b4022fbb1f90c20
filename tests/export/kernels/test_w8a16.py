"""w8a16 GEMM: within its bound of float64 at every edge of a tile, and equal to the project's layer where sums are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from export.kernels.epilogue import Int8Weight
from foundation.core.errors import InputError
from foundation.schemes.int8_weights import Int8WeightLinear, WeightScales
from tests.export.kernels.calls import w8a16_gemm

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]


def weight_of(outputs: int, inputs: int, bias: bool) -> Int8Weight:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return Int8Weight(codes, torch.rand(outputs) * 0.01 + 1e-4, torch.randn(outputs) if bias else None)


@given(
    st.sampled_from([1, 15, 16, 17, 65]), st.sampled_from([1, 63, 64, 65]), st.sampled_from([1, 31, 32, 128, 129, 300]), st.booleans(),
    st.sampled_from([torch.float16, torch.float32]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8)
@example(17, 65, 300, True, torch.float32, 0)
@example(65, 64, 256, True, torch.float16, 0)
@example(1, 1, 1, False, torch.float16, 0)
def test_against_float64(interpreted: Interpreted, rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inputs).to(dtype), weight_of(outputs, inputs, bias)
    found = interpreted(w8a16_gemm, x, weight)
    exact_weight = weight.codes.double() * weight.scale.double()[:, None]
    added = torch.zeros(outputs).double() if weight.bias is None else weight.bias.double()
    exact, size = x.double() @ exact_weight.T + added, x.double().abs() @ exact_weight.abs().T + added.abs()
    of_out = 2.0**-24 if dtype == torch.float32 else 2.0**-11
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= 2 * (inputs + 3) * 2.0**-24 * size + 1.001 * of_out * exact.abs() + 2.0**-24).all()


def test_the_kernel_is_the_layer_of_the_project_where_sums_are_exact(interpreted: Interpreted) -> None:
    codes, scale = torch.randint(-127, 128, (40, 97), dtype=torch.int8), torch.full((40,), 0.25)
    bias, x = torch.randint(-9, 10, (40,)).float(), torch.randint(-3, 4, (5, 97)).float()
    layer = Int8WeightLinear("layer", codes, WeightScales(scale), bias)
    assert torch.equal(interpreted(w8a16_gemm, x, Int8Weight(codes, scale, bias)), layer(x))


def test_an_activation_follows_and_wrong_input_is_refused(interpreted: Interpreted) -> None:
    x, weight = torch.randn(3, 33), weight_of(20, 33, True)
    plain, found = (interpreted(w8a16_gemm, x, weight, activation) for activation in ("none", "silu"))
    torch.testing.assert_close(found, torch.nn.functional.silu(plain), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match=r"x: .* given; a contiguous tensor of float16 or float32, of shape \[-1, 33\]"):
        w8a16_gemm(torch.ones(2, 32), weight)
