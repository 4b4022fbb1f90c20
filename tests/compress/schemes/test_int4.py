"""Int4 weights: packing, groups, the layer against a written-out one, and the grid that a checkpoint keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compress.schemes.int4 import Int4Scales, expand, group_scale, num_groups, pack, unpack
from compress.schemes.int8 import SMALLEST_SCALE


def random_codes(seed: int, outputs: int, inputs: int) -> Tensor:
    return torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_packed_codes_come_back_two_to_a_byte(seed: int, outputs: int, inputs: int) -> None:
    codes = random_codes(seed, outputs, inputs)
    packed = pack(codes)
    assert packed.shape == (outputs, (inputs + 1) // 2)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, inputs), codes)
    for o, i in np.ndindex(outputs, inputs):
        half = int(packed[o, i // 2]) >> 4 * (i % 2) & 15
        assert half == int(codes[o, i]) % 16
    assert inputs % 2 == 0 or not (packed[:, -1:] >> 4).any()


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 20), st.integers(1, 24))
@settings(max_examples=100, deadline=None)
def test_the_largest_weight_of_a_group_gets_the_largest_code(seed: int, outputs: int, inputs: int, group_size: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    weight[0, : inputs // 2] = 0
    scale = group_scale(weight, group_size)
    assert scale.shape == (outputs, -(-inputs // group_size)) == (outputs, num_groups(inputs, group_size))
    for o in range(outputs):
        for g in range(scale.shape[1]):
            largest = weight[o, g * group_size : (g + 1) * group_size].abs().max()  # the last group is shorter
            assert scale[o, g] == (1 if largest == 0 else max(largest / 7, SMALLEST_SCALE))
    expanded = expand(scale, group_size, inputs)
    assert all(expanded[o, i] == scale[o, i // group_size] for o, i in np.ndindex(outputs, inputs))


def linear_of(seed: int, inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    generator, linear = torch.Generator().manual_seed(seed), nn.Linear(inputs, outputs, bias=bias)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs", "group_size"), [(1, 1, 1), (7, 5, 3), (32, 4, 16), (33, 2, 16), (5, 3, 128)])
def test_a_layer_equals_the_written_out_one(inputs: int, outputs: int, group_size: int, bias: bool) -> None:
    linear = linear_of(inputs, inputs, outputs, bias)
    scales = Int4Scales(0.9 * group_scale(linear.weight.detach(), group_size), group_size)
    x = torch.randn(2, 3, inputs, generator=torch.Generator().manual_seed(1))
    weight = np.zeros((outputs, inputs), np.float32)
    for o, i in np.ndindex(outputs, inputs):
        scale = scales.weight_scale[o, i // group_size].item()
        weight[o, i] = np.float32(np.clip(np.rint(np.float32(linear.weight[o, i].item()) / np.float32(scale)), -8, 7) * np.float32(scale))
    layer = scales.module("encoder.0", linear)
    expected = nn.functional.linear(x, torch.from_numpy(weight), linear.bias)
    assert torch.equal(layer(x), expected)
    assert torch.equal(scales.on_grid(linear.weight.detach()), torch.from_numpy(weight))
    assert layer.weight.numel() == outputs * -(-inputs // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grid_weights_give_their_codes_back_in_any_type(dtype: torch.dtype) -> None:
    linear = linear_of(0, 40, 6)
    scales = Int4Scales(0.8 * group_scale(linear.weight.detach(), 16), 16)
    codes = scales.module("a", linear).codes()
    assert {int(codes.min()), int(codes.max())} == {-8, 7}
    linear.weight.data = scales.on_grid(linear.weight.detach())
    assert torch.equal(scales.on_grid(linear.weight.detach()), linear.weight)
    linear.to(dtype)
    assert scales.problem(linear.weight.detach()) is None
    assert torch.equal(scales.module("a", linear).codes(), codes)
    x = torch.randn(3, 40, dtype=dtype)
    assert scales.module("a", linear)(x).dtype == dtype


def test_scales_that_do_not_belong_to_the_weights_are_told() -> None:
    linear = linear_of(0, 20, 3)
    scale = group_scale(linear.weight.detach(), 8)
    scales = Int4Scales(scale, 8)
    assert "not on the grid" in str(scales.problem(linear.weight.detach()))
    linear.weight.data = scales.on_grid(linear.weight.detach())
    assert scales.problem(linear.weight.detach()) is None
    for wrong in (Int4Scales(scale[:, :2], 8), Int4Scales(scale, 16), Int4Scales(-scale, 8), Int4Scales(scale * torch.inf, 8)):
        assert "each group" in str(wrong.problem(linear.weight.detach()))
    linear.weight.data[1, 19] += 0.4 * scale[1, 2]
    assert "not on the grid" in str(scales.problem(linear.weight.detach()))
    linear.weight.data[1, 19] = torch.nan
    assert "not on the grid" in str(scales.problem(linear.weight.detach()))
