"""GELU and SiLU into int8 codes: by every method within its bound of float64 over all of bfloat16, and branchless as by IEEE division."""

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu import references
from benchmarks.gpu.references import LOGIT_ERROR, SHORT_LOGIT_ERROR, distance_bound
from export.kernels import activation_codes, gemm
from export.kernels.activation_codes import LOGIT, SHORT_LOGIT, Activation, Method
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.gemm import Tile
from foundation.core.errors import InputError
from tests.export.kernels.calls import int8_gemm

Interpreted = Callable[..., Any]
METHODS = get_args(Method)
MOST_OFF = {"exact": 1e-4, "branchless": 1e-4, "logistic": 3e-4, "tanh": 2e-2}
"""Shares of the numbers whose code is not the correctly rounded one."""


def probes() -> Tensor:
    """Returns every bfloat16 in [-10, 10] and 20,000 numbers between."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return torch.cat([halves[halves.abs() <= 10], torch.linspace(-10, 10, 20_000)])


def codes_of(y_O: Tensor, output: Output) -> Tensor:
    """Returns what the epilogue makes of any y: a GEMM of zeros, with y for a bias."""
    zeros, codes = torch.zeros(len(y_O), 16, dtype=torch.int8), torch.empty(1, len(y_O), dtype=torch.int8)
    layer = Int8Weight(zeros, torch.ones(len(y_O)), y_O)
    gemm.launch(zeros[:1], 1.0, layer, output, codes, Tile(1, 2**16, 16, 4, 1)).run()
    return codes[0]


def exactly(y: Tensor, activation: Activation) -> Tensor:
    """Returns f(y) in float64, number by number."""
    root = math.sqrt(2)
    share = (math.erfc(-one / root) / 2 if activation == "gelu" else 1 / (1 + math.exp(-one)) for one in y.double().tolist())
    return y.double() * torch.tensor(list(share), dtype=torch.float64)


@pytest.mark.parametrize("scale", [0.1, pytest.param(0.02, marks=pytest.mark.slow), 0.001])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_codes_are_the_rounded_ones_but_near_ties(interpreted: Interpreted, activation: Activation, scale: float) -> None:
    y = probes()
    f_y, step = exactly(y, activation), float(np.float32(scale))
    exact = f_y / step
    tie = (exact - exact.floor() - 0.5).abs()
    for method in METHODS:
        found = interpreted(codes_of, y, Output(activation, scale=scale, method=method)).double()
        apart = (found - exact.round().clamp(-128, 127)).abs()
        assert apart.max() <= 1, method
        assert (tie[apart > 0] <= distance_bound(y.double(), f_y, step, activation, method)[apart > 0]).all(), method
        assert (apart > 0).double().mean() <= MOST_OFF[method], method


@given(st.floats(2.0**-60, 2.0**60, width=32), st.sampled_from([0.0, 2.0**-23, -(2.0**-24)]), st.integers(0, 999))
@settings(max_examples=15)
def test_the_branchless_quotient_is_that_of_ieee_division(interpreted: Interpreted, scale: float, nudge: float, seed: int) -> None:
    scale = float(np.float32(scale) * np.float32(1 + nudge))
    ties = torch.arange(-140, 141).float() / 2 * torch.tensor(scale)
    torch.manual_seed(seed)
    near = torch.cat([ties, *(torch.nextafter(ties, torch.full_like(ties, end)) for end in (-torch.inf, torch.inf))])
    y = torch.cat([near, torch.randn(200) * 60 * scale, torch.tensor([0.0, -0.0, 3e38, -3e38, 1e-45, 2.0**-126])])
    found = interpreted(codes_of, y, Output(scale=scale, method="branchless"))
    assert torch.equal(found, torch.round(y / torch.tensor(scale)).clamp(-128, 127).to(torch.int8))


@pytest.mark.parametrize(("coefficients", "error"), [(LOGIT, LOGIT_ERROR), (SHORT_LOGIT, SHORT_LOGIT_ERROR)])
def test_the_polynomials_are_as_near_as_is_said_and_grow_without_end(coefficients: tuple[float, ...], error: float) -> None:
    y = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    logit = sum(c * y ** (2 * at + 1) for at, c in enumerate(coefficients))
    found = (y * (torch.sigmoid(torch.as_tensor(logit)) - torch.special.ndtr(y))).abs().max()
    assert 0.9 * error < found <= error
    far = np.linspace(0, 1e3, 1_000_001)
    assert (np.diff(sum(c * far ** (2 * at + 1) for at, c in enumerate(coefficients))) > 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_far_out_codes_are_zero_or_the_largest(interpreted: Interpreted, activation: Activation, method: Method) -> None:
    found = interpreted(codes_of, torch.tensor([-1e4, -80.0, 0.0, 80.0, 1e4]), Output(activation, scale=0.1, method=method))
    assert found.tolist() == [0, 0, 0, 127, 127]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 16), (20, 70, 96), (17, 129, 40)])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("out_scale", [None, 0.01])
def test_ending_in_halves_changes_no_bit(
    interpreted: Interpreted, rows: int, outputs: int, inputs: int, dynamic: bool, out_scale: float | None
) -> None:
    torch.manual_seed(rows)
    x = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
    layer = Int8Weight(
        torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs) * 1e-3 + 1e-5, torch.randn(outputs)
    )
    scale, output = torch.rand(rows, 1) + 1e-3 if dynamic else 0.03, Output(dtype=torch.float32, scale=out_scale)
    found = interpreted(in_halves, x, scale, layer, output)
    assert torch.equal(found, references.gemm(x, scale, layer, output))


def in_halves(x: Tensor, scale: float | Tensor, layer: Int8Weight, output: Output) -> Tensor:
    out = torch.empty(len(x), len(layer.codes), dtype=output.stored)
    gemm.launch(x, scale, layer, output, out, Tile(16, 64, 32, 4, 3, True)).run()
    return out


def test_the_method_that_is_taken_is_one_and_another_is_refused(interpreted: Interpreted) -> None:
    assert Output("gelu", scale=0.1).method == activation_codes.METHOD
    with pytest.raises(InputError, match="method: 'fast' given; exact, branchless, logistic, tanh"):
        Output("gelu", scale=0.1, method="fast")  # type: ignore[arg-type]
    x, layer = torch.ones(2, 16, dtype=torch.int8), Int8Weight(torch.ones(3, 16, dtype=torch.int8), torch.ones(3))
    floats = [interpreted(int8_gemm, x, 0.1, layer, Output("gelu", torch.float32, method=method)) for method in METHODS]
    assert all(torch.equal(floats[0], other) for other in floats)  # without codes there is nothing to choose
