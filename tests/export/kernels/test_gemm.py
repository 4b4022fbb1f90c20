"""int8 GEMM and its epilogue: sums exact, outputs equal to torch to the bit, activations within their bound of float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu import references
from export.kernels.epilogue import Int8Weight, Output
from foundation.core.errors import InputError
from foundation.schemes.int8 import DynamicInt8Linear, DynamicScales, Int8Linear, LayerScales
from tests.export.kernels.calls import int8_gemm

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
ROWS = st.sampled_from([1, 2, 15, 16, 17, 64, 65, 130])
OUTPUTS = st.sampled_from([1, 3, 63, 64, 65, 128, 129])
INPUTS = st.sampled_from([1, 2, 31, 32, 63, 128, 129, 300])
FUNCTIONS = {"none": lambda y: y, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def codes(*shape: int) -> Tensor:
    """Returns random codes, many of them at the ends."""
    drawn = torch.randint(-160, 161, shape).clamp(-128, 127)
    return drawn.to(torch.int8)


def weight(outputs: int, inputs: int, bias: bool) -> Int8Weight:
    return Int8Weight(codes(outputs, inputs), torch.rand(outputs) * 1e-3 + 1e-5, torch.randn(outputs) if bias else None)


@given(ROWS, OUTPUTS, INPUTS, st.booleans(), st.booleans(), st.sampled_from([None, 0.003, 0.1]), st.integers(0, 999))
@settings(max_examples=10)
@example(130, 129, 300, True, True, 0.1, 0)
@example(1, 1, 1, False, False, None, 0)
def test_without_activation_every_bit_is_torchs(
    interpreted: Interpreted, rows: int, outputs: int, inputs: int, bias: bool, dynamic: bool, out_scale: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    x, layer = codes(rows, inputs), weight(outputs, inputs, bias)
    scale = torch.rand(rows, 1) * 0.1 + 1e-4 if dynamic else 0.037
    output = Output(dtype=torch.float32, scale=out_scale)
    found = interpreted(int8_gemm, x, scale, layer, output)
    torch.testing.assert_close(found, references.gemm(x, scale, layer, output), rtol=0, atol=0)


def test_sums_at_the_ends_are_exact(interpreted: Interpreted) -> None:
    x, inputs = torch.full((3, 2**17 - 1), -128, dtype=torch.int8), 2**17 - 1
    layer = Int8Weight(torch.full((2, inputs), -128, dtype=torch.int8), torch.ones(2))
    found = interpreted(int8_gemm, x, 1.0, layer, Output(dtype=torch.float32))
    assert found.unique().tolist() == [float(torch.tensor(128 * 128 * inputs, dtype=torch.float32))]


def test_requantized_ties_go_to_even_and_ends_saturate(interpreted: Interpreted) -> None:
    x = torch.tensor([[1], [3], [5], [-1], [-3], [127], [-128]], dtype=torch.int8)
    layer = Int8Weight(torch.tensor([[1], [127]], dtype=torch.int8), torch.ones(2))
    found = interpreted(int8_gemm, x, 1.0, layer, Output(scale=2.0))
    assert found[:, 0].tolist() == [0, 2, 2, 0, -2, 64, -64]
    assert found[:, 1].tolist() == [64, 127, 127, -64, -128, 127, -128]


@given(st.sampled_from(["gelu", "silu"]), ROWS, st.sampled_from([0.01, 0.05]), st.integers(0, 999))
@settings(max_examples=10)
def test_activations_are_within_their_bound_of_float64(
    interpreted: Interpreted, activation: str, rows: int, out_scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x, layer = codes(rows, 65), weight(33, 65, True)
    output = Output(activation, torch.float32)
    y = references.gemm(x, 0.03, layer, Output(dtype=torch.float32)).double()
    exact, bound = FUNCTIONS[activation](y), 2.0**-20 * y.abs()
    assert ((interpreted(int8_gemm, x, 0.03, layer, output).double() - exact).abs() <= bound).all()
    half = interpreted(int8_gemm, x, 0.03, layer, replace(output, dtype=torch.float16)).double()
    assert ((half - exact).abs() <= bound + 2.0**-11 * exact.abs() + 2.0**-25).all()
    requantized = interpreted(int8_gemm, x, 0.03, layer, replace(output, scale=out_scale)).double()
    steps = exact / torch.tensor(out_scale).double()
    near_tie = ((steps - steps.floor() - 0.5).abs() <= bound / out_scale + 2.0**-16).logical_and(steps.abs() < 129)
    assert torch.equal(requantized[~near_tie], steps.round().clamp(-128, 127)[~near_tie])
    assert ((requantized - steps.round().clamp(-128, 127)).abs() <= 1).all()
    assert near_tie.double().mean() < 0.02  # the bound excuses next to nothing


@pytest.mark.parametrize("rows", [5, 70])
def test_the_kernel_is_the_layer_of_the_project(interpreted: Interpreted, rows: int) -> None:
    weight_scale, bias = torch.rand(40) * 1e-2 + 1e-3, torch.randn(40)
    stored, x = codes(40, 96).clamp(min=-127), torch.randn(rows, 96)
    static = Int8Linear("layer", stored, LayerScales(weight_scale, torch.tensor(0.02), 8), bias)
    dynamic = DynamicInt8Linear("layer", stored, DynamicScales(weight_scale, 8), bias)
    layer, output = Int8Weight(stored, weight_scale, bias), Output(dtype=torch.float32)
    assert torch.equal(interpreted(int8_gemm, static.codes(x), float(static.input_scale), layer, output), static(x))
    dynamic_codes, scale = dynamic.codes(x)
    assert torch.equal(interpreted(int8_gemm, dynamic_codes, scale, layer, output), dynamic(x))


def test_wrong_input_is_refused() -> None:
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=r"scale of the output: .* given; a scale from"):
            Output(scale=scale)
    with pytest.raises(InputError, match=r"scale: .* given; a positive number"):
        Int8Weight(codes(2, 4), torch.tensor([1.0, 0.0]))
    with pytest.raises(InputError, match=r"activation: .* given; none, gelu, gelu_tanh, silu"):
        Output("mish")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="bias: "):
        Int8Weight(codes(2, 4), torch.ones(2), torch.ones(3))
