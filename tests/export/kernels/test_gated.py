"""The gated product: its floats within their bound of float64, its codes the rounded ones but near ties, at every edge of a tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from export.kernels.epilogue import Int8Weight, Output
from foundation.core.errors import InputError
from tests.export.kernels.calls import gated_gemm

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda g: g,
    "silu": lambda g: g * torch.sigmoid(g),
    "gelu": lambda g: g * torch.special.ndtr(g),
    "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
    "relu": torch.relu,
}


def codes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def weight_of(outputs: int, inputs: int, bias: bool) -> Int8Weight:
    spread = 2.0 / (74.0 * 74.0 * inputs**0.5)
    return Int8Weight(codes(outputs, inputs), (torch.rand(outputs) + 0.5) * spread, torch.randn(outputs) if bias else None)


def product(x: Tensor, scale: float | Tensor, weight: Int8Weight) -> Tensor:
    """Returns y as float32 rounds it; float64 of it."""
    sums = (x.long() @ weight.codes.long().T).float()
    y = sums * scale * weight.scale if isinstance(scale, Tensor) else sums * (torch.tensor(scale) * weight.scale)
    return (y if weight.bias is None else y + weight.bias).double()


@given(
    st.sampled_from([1, 16, 17, 64, 65]), st.sampled_from([1, 63, 64, 65]), st.sampled_from([1, 32, 129]), st.booleans(), st.booleans(),
    st.sampled_from(list(EXACT)), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=6)
@example(130, 65, 129, True, True, "silu", 0)
@example(1, 1, 1, False, False, "gelu_tanh", 0)
@example(17, 63, 32, False, False, "relu", 0)
def test_against_float64(
    interpreted: Interpreted, rows: int, outputs: int, inputs: int, bias: bool, dynamic: bool, activation: str, seed: int
) -> None:
    torch.manual_seed(seed)
    x, gate, up = codes(rows, inputs), weight_of(outputs, inputs, bias), weight_of(outputs, inputs, bias)
    scale = torch.rand(rows, 1) + 0.5 if dynamic else 0.9
    g, u = product(x, scale, gate), product(x, scale, up)
    exact = EXACT[activation](g) * u
    floats = interpreted(gated_gemm, x, scale, gate, up, Output(activation, torch.float32)).double()
    assert ((floats - exact).abs() <= 2.0**-20 * (g * u).abs() + 2.0**-126).all()
    step = float(torch.tensor(0.02))
    found = interpreted(gated_gemm, x, scale, gate, up, Output(activation, scale=0.02)).double()
    steps = exact / step
    off = (found - steps.round().clamp(-128, 127)).abs()
    tie = (steps - steps.floor() - 0.5).abs()
    assert off.max() <= 1
    assert (tie[off > 0] <= (2.0**-20 * (g * u).abs() / step + 2.0**-16)[off > 0]).all()


def test_gate_and_up_have_to_be_alike() -> None:
    x = codes(2, 8)
    for up in (weight_of(5, 8, True), weight_of(4, 8, False)):
        with pytest.raises(InputError, match=r"gate, up: .* given; both have one shape, and both or none have a bias"):
            gated_gemm(x, 0.1, weight_of(4, 8, True), up, Output("silu"))
