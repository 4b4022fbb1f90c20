"""Int4 weights: packing, groups, the layer against a written-out one, and the grid that a checkpoint keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.schemes.int4 import Int4Linear, Int4Scales, expand, group_range, group_scale, num_groups, pack, unpack
from foundation.schemes.scales import SMALLEST_SCALE
from foundation.schemes.weight_only import dequantized_once


def random_codes(seed: int, outputs: int, inputs: int) -> Tensor:
    return torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(0, 9))
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


MAGNITUDES = st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e37])


@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 24),
    st.sampled_from([-3.0, -0.3, 0.0, 0.3, 3.0]),
    MAGNITUDES,
)
def test_the_whole_range_of_a_group_moves_a_weight_by_half_a_step(
    seed: int, outputs: int, inputs: int, group_size: int, mean: float, magnitude: float
) -> None:
    """Also where all weights of a group lie on one side of 0, are equal, or are 0."""
    weight = (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) + mean) * magnitude
    weight[0, : inputs // 2] = 0
    weight[-1, :group_size] = mean * magnitude
    scale, zero_point = group_range(weight, group_size)[:2]
    scales = Int4Scales(scale, group_size, zero_point)
    assert scales.problem(scales.on_grid(weight)) is None
    codes, rounded = scales.codes(weight), scales.on_grid(weight)
    assert codes.min() >= -8
    assert codes.max() <= 7
    assert not rounded[weight == 0].any()
    assert ((rounded - weight).abs().double() <= 0.50001 * scales.expanded(inputs).double()).all()
    assert scales.weight_zero_point is not None
    for o in range(outputs):
        for g in range(num_groups(inputs, group_size)):
            part = weight[o, g * group_size : (g + 1) * group_size].double()
            low, high = min(0.0, float(part.min())), max(0.0, float(part.max()))
            step = (high - low) / 15
            assert float(scales.weight_scale[o, g]) == pytest.approx(max(step, SMALLEST_SCALE) if step else 1, rel=1e-5)
            assert abs(int(scales.weight_zero_point[o, g]) - (-8 - low / float(scales.weight_scale[o, g]))) <= 0.5001
            for value, code in zip(part, codes[o, g * group_size : (g + 1) * group_size], strict=True):
                zero, scale = int(scales.weight_zero_point[o, g]), np.float32(scales.weight_scale[o, g].item())
                assert int(code) == min(max(int(np.rint(np.float32(value.item()) / scale)) + zero, -8), 7)


def test_zero_points_of_ranges_on_one_side_of_zero_are_the_ends_of_the_codes() -> None:
    weight = torch.tensor([[3.0, 1, 2, 0.5], [-3, -1, -2, -0.5], [2, 2, 2, 2], [-2, -2, -2, -2], [-15, 15, 0, 1]])
    scale, zero_point = group_range(weight, 4)[:2]
    assert zero_point is not None
    assert zero_point.dtype == torch.int8
    assert zero_point[:, 0].tolist() == [-8, 7, -8, 7, 0]  # -0.5 rounds to the even 0
    rounded = Int4Scales(scale, 4, zero_point).on_grid(weight)
    torch.testing.assert_close(rounded[2:4], weight[2:4])


def linear_of(seed: int, inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    generator, linear = torch.Generator().manual_seed(seed), nn.Linear(inputs, outputs, bias=bias)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return linear


def scales_of(weight: Tensor, group_size: int, symmetric: bool) -> Int4Scales:
    """Returns scales with which some codes are cut off."""
    if symmetric:
        return Int4Scales(0.8 * group_scale(weight, group_size), group_size)
    scale, zero_point = group_range(weight, group_size)[:2]
    return Int4Scales(0.8 * scale, group_size, zero_point)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs", "group_size"), [(1, 1, 1), (7, 5, 3), (32, 4, 16), (33, 2, 16), (5, 3, 128)])
def test_a_layer_equals_the_written_out_one(inputs: int, outputs: int, group_size: int, bias: bool, symmetric: bool) -> None:
    linear = linear_of(inputs, inputs, outputs, bias)
    linear.weight.data += 0.5
    scales = scales_of(linear.weight.detach(), group_size, symmetric)
    x = torch.randn(2, 3, inputs, generator=torch.Generator().manual_seed(1))
    weight = np.zeros((outputs, inputs), np.float32)
    for o, i in np.ndindex(outputs, inputs):
        scale = np.float32(scales.weight_scale[o, i // group_size].item())
        zero = 0 if scales.weight_zero_point is None else int(scales.weight_zero_point[o, i // group_size])
        code = np.clip(np.rint(np.float32(linear.weight[o, i].item()) / scale) + zero, -8, 7)
        weight[o, i] = np.float32((code - zero) * scale)
        assert scales.codes(linear.weight.detach())[o, i] == code
    layer = scales.module("encoder.0", linear)
    expected = nn.functional.linear(x, torch.from_numpy(weight), linear.bias)
    assert torch.equal(layer(x), expected)
    assert torch.equal(scales.on_grid(linear.weight.detach()), torch.from_numpy(weight))
    assert layer.weight.numel() == outputs * -(-inputs // 2)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grid_weights_give_their_codes_back_in_any_type(dtype: torch.dtype, symmetric: bool) -> None:
    linear = linear_of(0, 40, 6)
    linear.weight.data += 0 if symmetric else torch.linspace(-3, 3, 6)[:, None]
    scales = scales_of(linear.weight.detach(), 16, symmetric)
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


def test_zero_points_that_are_none_are_told() -> None:
    linear = linear_of(0, 20, 3)
    scales = scales_of(linear.weight.detach(), 8, symmetric=False)
    linear.weight.data = scales.on_grid(linear.weight.detach())
    assert scales.problem(linear.weight.detach()) is None
    zero_point = scales.weight_zero_point
    assert zero_point is not None
    for wrong in (zero_point[:, :2], zero_point.float(), zero_point + 16, zero_point - 16):
        assert "zero points must be int8" in str(replace(scales, weight_zero_point=wrong).problem(linear.weight.detach()))
    assert "not on the grid" in str(replace(scales, weight_zero_point=zero_point.flip(0)).problem(linear.weight.detach()))
    assert "not on the grid" in str(replace(scales, weight_zero_point=None).problem(linear.weight.detach()))


@pytest.mark.parametrize("symmetric", [True, False])
def test_files_give_the_same_scales_back(symmetric: bool) -> None:
    scales = scales_of(torch.randn(3, 20), 8, symmetric)
    tensors = {f"a.{key}": tensor for key, tensor in scales.tensors().items()}
    assert scales.entry() == {"weight_bits": 4, "group_size": 8} | ({} if symmetric else {"symmetric": False})
    read = Int4Scales.read("a", tensors, scales.entry())
    assert read.group_size == 8
    assert read.symmetric == symmetric
    assert all(torch.equal(read.tensors()[key], tensor) for key, tensor in scales.tensors().items())
    for other in (not symmetric, 0, None, "yes"):
        with pytest.raises(ValueError, match="symmetric must be false for layers with zero points"):
            Int4Scales.read("a", tensors, {**scales.entry(), "symmetric": other})


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_dequantized_once_give_the_same_answers_and_are_let_go(symmetric: bool) -> None:
    zero_points = None if symmetric else torch.randint(-8, 8, (5, 3), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    scales = Int4Scales(torch.rand(5, 3, generator=torch.Generator().manual_seed(3)) + 0.1, 4, zero_points)
    layer = Int4Linear("layer", random_codes(1, 5, 11), scales, torch.ones(5))
    model, rows = nn.Sequential(layer), torch.randn(2, 11, generator=torch.Generator().manual_seed(4))
    before = model(rows)
    with dequantized_once(model):
        layer.weight.zero_()  # the packed weights are not read again
        assert torch.equal(model(rows), before)
    assert layer.cached_OI is None
    assert not torch.equal(model(rows), before)
