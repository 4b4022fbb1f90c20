"""GELU, SiLU and ReLU into int8 codes: by every method within its bound of float64 over bfloat16, whatever its instructions round."""

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gpu import references
from benchmarks.gpu.references import FITTED_ERROR, LOGIT_ERROR, SHORT_LOGIT_ERROR, distance_bound
from export.kernels import activation_codes, gemm
from export.kernels.activation_codes import FITTED_LOGIT, LOGIT, SHORT_LOGIT, Activation, Method
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.gemm import Tile
from foundation.core.errors import InputError
from tests.export.kernels.calls import int8_gemm

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
METHODS = get_args(Method)
MOST_OFF = {"exact": 1e-4, "fitted": 1e-4, "logistic": 3e-4, "tanh": 2e-2}
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
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(y.double(), approximate="tanh")
    root = math.sqrt(2)
    share = (math.erfc(-one / root) / 2 if activation == "gelu" else 1 / (1 + math.exp(-one)) for one in y.double().tolist())
    return y.double() * torch.tensor(list(share), dtype=torch.float64)


@pytest.mark.parametrize("scale", [0.1, pytest.param(0.02, marks=pytest.mark.slow), 0.001])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
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


@pytest.mark.first(1)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("scale", [0.1, 0.001])
def test_instructions_as_bad_as_promised_keep_the_bound(interpreted: Interpreted, activation: Activation, scale: float) -> None:
    y = probes()
    f_y, step = exactly(y, activation), float(np.float32(scale))
    exact, bound = f_y / step, distance_bound(y.double(), f_y, step, activation, "fitted")
    tie = (exact - exact.floor() - 0.5).abs()

    def keeps_the_bound(up: float, down: float) -> bool:
        found = interpreted(codes_by_rough_instructions, y, Output(activation, scale=scale, method="fitted"), (up, down))
        apart = (found.double() - exact.round().clamp(-128, 127)).abs()
        return bool(apart.max() <= 1 and (tie[apart > 0] <= bound[apart > 0]).all())

    promised = 2.0**-22
    assert all(keeps_the_bound(up, down) for up in (promised, -promised) for down in (promised, -promised))
    assert not keeps_the_bound(2.0**-12, 0.0)
    assert not keeps_the_bound(0.0, 2.0**-14)


def codes_by_rough_instructions(y_O: Tensor, output: Output, off: tuple[float, float]) -> Tensor:
    """Returns the codes where 2^x and 1 / x are off by so much, relatively."""
    right, tl = (activation_codes.exp2_approximate, activation_codes.reciprocal_approximate), activation_codes.tl
    try:
        activation_codes.exp2_approximate = lambda x: tl.exp2(tl.minimum(x, 127.0)) * (1.0 + off[0])
        activation_codes.reciprocal_approximate = lambda x: (1.0 / x) * (1.0 + off[1])
        return codes_of(y_O, output)
    finally:
        activation_codes.exp2_approximate, activation_codes.reciprocal_approximate = right


@pytest.mark.parametrize(("coefficients", "error"), [(FITTED_LOGIT, FITTED_ERROR), (LOGIT, LOGIT_ERROR), (SHORT_LOGIT, SHORT_LOGIT_ERROR)])
def test_the_polynomials_are_as_near_as_is_said_and_grow_without_end(coefficients: tuple[float, ...], error: float) -> None:
    y = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    logit = sum(c * y ** (2 * at + 1) for at, c in enumerate(coefficients))
    found = (y * (torch.sigmoid(torch.as_tensor(logit)) - torch.special.ndtr(y))).abs().max()
    assert 0.9 * error < found <= error
    far = np.linspace(0, 1e3, 1_000_001)
    assert (np.diff(sum(c * far ** (2 * at + 1) for at, c in enumerate(coefficients))) > 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_far_out_codes_are_zero_or_the_largest(interpreted: Interpreted, activation: Activation, method: Method) -> None:
    found = interpreted(codes_of, torch.tensor([-1e4, -80.0, 0.0, 80.0, 1e4]), Output(activation, scale=0.1, method=method))
    assert found.tolist() == [0, 0, 0, 127, 127]


@pytest.mark.first(1)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 16), (20, 70, 96), (90, 129, 40)])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("out_scale", [None, 0.01])
@pytest.mark.parametrize(("halves", "persistent"), [(True, False), (False, True), (True, True)])
def test_how_a_tile_ends_and_who_computes_it_changes_no_bit(
    interpreted: Interpreted, rows: int, outputs: int, inputs: int, dynamic: bool, out_scale: float | None, halves: bool, persistent: bool
) -> None:
    torch.manual_seed(rows)
    x = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
    layer = Int8Weight(
        torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs) * 1e-3 + 1e-5, torch.randn(outputs)
    )
    scale, output = torch.rand(rows, 1) + 1e-3 if dynamic else 0.03, Output(dtype=torch.float32, scale=out_scale)
    found = interpreted(in_tiles, x, scale, layer, output, Tile(16, 64, 32, 4, 3, halves, persistent))
    assert torch.equal(found, references.gemm(x, scale, layer, output))


def in_tiles(x: Tensor, scale: float | Tensor, layer: Int8Weight, output: Output, tile: Tile) -> Tensor:
    out = torch.empty(len(x), len(layer.codes), dtype=output.stored)
    gemm.launch(x, scale, layer, output, out, tile).run()
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [0.1, 0.001])
def test_relu_equals_torch_to_the_bit(interpreted: Interpreted, method: Method, scale: float) -> None:
    y = probes()
    found = interpreted(codes_of, y, Output("relu", scale=scale, method=method))
    assert torch.equal(found, references.quantized(torch.relu(y), scale))
    assert found.min() == 0
    assert found.max() > 90


def test_the_method_that_is_taken_is_one_and_another_is_refused(interpreted: Interpreted) -> None:
    assert Output("gelu", scale=0.1).method == activation_codes.METHOD
    with pytest.raises(InputError, match="method: 'fast' given; exact, fitted, logistic, tanh"):
        Output("gelu", scale=0.1, method="fast")  # type: ignore[arg-type]
    x, layer = torch.ones(2, 16, dtype=torch.int8), Int8Weight(torch.ones(3, 16, dtype=torch.int8), torch.ones(3))
    floats = [interpreted(int8_gemm, x, 0.1, layer, Output("gelu", torch.float32, method=method)) for method in METHODS]
    assert all(torch.equal(floats[0], other) for other in floats)  # without codes there is nothing to choose
