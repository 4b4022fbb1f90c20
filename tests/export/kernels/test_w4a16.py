"""w4a16 GEMM: within its bound of float64 on the project's own packing, and equal to the project's layer where sums are exact."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu import references
from export.fused.layers import ACTIVATIONS
from export.kernels.activation_codes import Activation
from export.kernels.w4a16 import Int4Weight
from foundation.core.errors import InputError
from foundation.schemes.int4 import Int4Linear, Int4Scales, num_groups, pack
from tests.export.kernels.calls import w4a16_gemm

Interpreted = Callable[..., Any]


def weight_of(outputs: int, inputs: int, group_size: int, symmetric: bool = True, bias: bool = True) -> Int4Weight:
    codes = torch.randint(-8, 8, (outputs, inputs)).to(torch.int8)
    groups = (outputs, num_groups(inputs, group_size))
    zero_point = None if symmetric else torch.randint(-8, 8, groups).to(torch.int8)
    scale = torch.rand(groups) * 0.1 + 1e-3
    return Int4Weight(pack(codes), inputs, group_size, scale, zero_point, torch.randn(outputs) if bias else None)


def check(found: Tensor, x: Tensor, weight: Int4Weight) -> None:
    """Checks outputs by the bound that the docstring of the kernel states."""
    exact_weight, of_out = references.rounded_weight(weight, x.dtype).double(), 2.0**-24 if x.dtype == torch.float32 else 2.0**-11
    bias = torch.zeros(len(weight.packed)).double() if weight.bias is None else weight.bias.double()
    exact = x.double() @ exact_weight.T + bias
    size = x.double().abs() @ exact_weight.abs().T + bias.abs()
    bound = 2 * (weight.inputs + 2) * 2.0**-24 * size + 1.001 * of_out * exact.abs() + 2.0**-24
    assert ((found.double() - exact).abs() <= bound).all()


@given(
    st.sampled_from([1, 2, 15, 16, 17]), st.sampled_from([1, 3, 63, 64, 65]), st.sampled_from([1, 2, 15, 31, 64, 129, 256, 300]),
    st.sampled_from([1, 3, 16, 32, 48, 100, 128, 256]), st.booleans(), st.booleans(),
    st.sampled_from([torch.float16, torch.float32]), st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=15)
@example(17, 65, 300, 128, False, True, torch.float32, 0)
@example(1, 1, 1, 1, True, False, torch.float16, 0)
@example(16, 64, 256, 32, True, True, torch.float16, 0)
def test_against_float64(
    interpreted: Interpreted, rows: int, outputs: int, inputs: int, group_size: int, symmetric: bool, bias: bool,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inputs).to(dtype), weight_of(outputs, inputs, group_size, symmetric, bias)
    check(interpreted(w4a16_gemm, x, weight), x, weight)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 24])
def test_the_kernel_is_the_layer_of_the_project_where_sums_are_exact(interpreted: Interpreted, symmetric: bool, group_size: int) -> None:
    codes = torch.randint(-8, 8, (40, 97)).to(torch.int8)
    groups = (40, num_groups(97, group_size))
    scales = Int4Scales(torch.full(groups, 0.25), group_size, None if symmetric else torch.randint(-8, 8, groups).to(torch.int8))
    bias = torch.randint(-9, 10, (40,)).float()
    layer = Int4Linear("layer", codes, scales, bias)
    weight = Int4Weight(layer.weight.view(torch.uint8), 97, group_size, layer.weight_scale, layer.weight_zero_point, bias)
    x = torch.randint(-3, 4, (5, 97)).half()
    found = interpreted(w4a16_gemm, x, weight)
    assert torch.equal(found.float(), layer(x.float()))
    assert torch.equal(found, references.w4a16_gemm(x, weight))


def test_every_code_in_either_half_of_a_byte(interpreted: Interpreted) -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).reshape(16, 1).repeat(1, 2)
    weight = Int4Weight(pack(codes), 2, 2, torch.ones(16, 1))
    assert interpreted(w4a16_gemm, torch.eye(2).half(), weight).tolist() == [list(range(-8, 8))] * 2


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_an_activation_follows(interpreted: Interpreted, activation: Activation) -> None:
    x, weight = torch.randn(3, 33), weight_of(20, 33, 16)
    wanted = ACTIVATIONS[activation](references.w4a16_gemm(x, weight))
    torch.testing.assert_close(interpreted(w4a16_gemm, x, weight, activation), wanted, rtol=1e-5, atol=1e-5)


def test_wrong_input_is_refused() -> None:
    weight = weight_of(4, 9, 4)
    with pytest.raises(InputError, match=r"x: .* given; a contiguous tensor of float16"):
        w4a16_gemm(torch.ones(2, 9).bfloat16(), weight)
    with pytest.raises(InputError, match=r"scale: .* given; a positive number"):
        replace(weight, scale=torch.zeros(4, 3))
    with pytest.raises(InputError, match=r"scale: .* given; a contiguous tensor of float32, of shape \[4, 3\]"):
        replace(weight, scale=torch.ones(4, 2))
    with pytest.raises(InputError, match="packed codes: "):
        replace(weight, inputs=11)
    with pytest.raises(InputError, match="group_size"):
        replace(weight, group_size=0)
