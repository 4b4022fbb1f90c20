"""E4M3: its numbers, the layer against a written-out one, and the grid that a checkpoint keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foundation.core.errors import InputError
from foundation.schemes.fp8 import HARDWARE, Fp8Scales, fp8_matmul, to_e4m3
from foundation.schemes.int8 import weight_scale

ONE = torch.ones(())
POSITIVE = [(1 + f / 8) * 2.0 ** (e - 7) if e else f / 8 * 2.0**-6 for e in range(16) for f in range(8)]
VALUES = np.array([*POSITIVE, *(-value for value in POSITIVE)])
VALUES = np.unique(VALUES[np.abs(VALUES) <= 448])  # the last code of either sign is NaN


def nearest(x: np.ndarray) -> np.ndarray:
    """Rounds to the nearest E4M3 number, to the one with the even fraction where two are equally near, saturating."""
    x = np.clip(x.astype(np.float64), -448, 448)
    above = np.clip(np.searchsorted(VALUES, x), 1, len(VALUES) - 1)
    low, high = VALUES[above - 1], VALUES[above]
    middle = (low + high) / 2
    even = np.where((above - np.searchsorted(VALUES, 0.0)) % 2 == 0, high, low)
    return np.where(x < middle, low, np.where(x > middle, high, even))


@given(st.lists(st.floats(-600, 600, width=32), min_size=1, max_size=50))
def test_numbers_are_rounded_to_the_nearest(values: list[float]) -> None:
    x = torch.tensor(values)
    assert np.array_equal(to_e4m3(x, ONE).float().numpy(), nearest(x.numpy()))


def test_every_number_and_every_half_way_is_known() -> None:
    middles = (VALUES[1:] + VALUES[:-1]) / 2
    for given_values in (VALUES, middles):
        x = torch.from_numpy(given_values).float()
        assert np.array_equal(to_e4m3(x, ONE).float().numpy(), nearest(given_values))
    assert to_e4m3(torch.tensor([464.0, 1e9, -1e9]), ONE).float().tolist() == [448, 448, -448]


def linear_of(seed: int, inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    generator, linear = torch.Generator().manual_seed(seed), nn.Linear(inputs, outputs, bias=bias)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return linear


def scales_of(linear: nn.Linear) -> Fp8Scales:
    return Fp8Scales(weight_scale(linear.weight.detach(), 448), torch.tensor(0.01))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (40, 3)])
def test_a_layer_equals_the_written_out_one(inputs: int, outputs: int, bias: bool) -> None:
    linear = linear_of(inputs, inputs, outputs, bias)
    scales, x = scales_of(linear), 3 * torch.randn(2, 3, inputs, generator=torch.Generator().manual_seed(1))
    codes_x = nearest((x / scales.input_scale).numpy())
    codes_w = nearest((linear.weight.detach() / scales.weight_scale[:, None]).numpy())
    assert np.abs(codes_w).max() == 448
    expected = codes_x @ codes_w.T * (scales.input_scale * scales.weight_scale).double().numpy()
    expected += linear.bias.detach().double().numpy() if bias else 0
    np.testing.assert_allclose(scales.module("a", linear)(x).numpy(), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(scales.module("a", linear).codes(x).float().numpy(), codes_x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grid_weights_give_their_numbers_back(dtype: torch.dtype) -> None:
    linear = linear_of(0, 300, 6)
    linear.weight.data *= torch.logspace(-4, 1, 300)  # down to numbers that E4M3 has fewer bits for
    scales = scales_of(linear)
    assert "not on the grid" in str(scales.problem(linear.weight.detach()))
    numbers = scales.module("a", linear).weight.float()
    linear.weight.data = scales.on_grid(linear.weight.detach())
    assert torch.equal(scales.on_grid(linear.weight.detach()), linear.weight)
    linear.to(dtype)
    assert scales.problem(linear.weight.detach()) is None
    assert torch.equal(scales.module("a", linear).weight.float(), numbers)
    assert scales.module("a", linear)(torch.randn(3, 300, dtype=dtype)).dtype == dtype
    linear.weight.data[0, 0] = torch.nan
    assert "not on the grid" in str(scales.problem(linear.weight.detach()))


def test_scales_of_another_shape_or_sign_are_told() -> None:
    linear = linear_of(0, 8, 3)
    scale = weight_scale(linear.weight.detach(), 448)
    for wrong in (Fp8Scales(scale[:2], ONE), Fp8Scales(scale, scale), Fp8Scales(-scale, ONE), Fp8Scales(scale, 0 * ONE)):
        assert "must be positive numbers" in str(wrong.problem(linear.weight.detach()))


def test_large_values_saturate_and_those_without_a_number_are_refused_by_name() -> None:
    linear = linear_of(0, 4, 2)
    layer = scales_of(linear).module("encoder.0", linear)
    assert layer(torch.full((1, 4), 3e38)).isfinite().all()
    with pytest.raises(InputError, match=r"encoder\.0.*NaN or infinity"):
        layer(torch.full((1, 4), torch.nan))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 16), (5, 33, 7), (64, 256, 48)])
def test_the_gpu_multiplies_the_same_numbers(rows: int, inputs: int, outputs: int) -> None:
    assert torch.cuda.get_device_capability() >= HARDWARE
    generator = torch.Generator().manual_seed(0)
    a, b = (to_e4m3(torch.randn(n, inputs, generator=generator), torch.tensor(0.01)) for n in (rows, outputs))
    expected = a.double() @ b.double().T
    found = fp8_matmul(a.cuda(), b.cuda()).cpu()
    assert found.shape == (rows, outputs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
