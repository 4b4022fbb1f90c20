"""Int8 weights with float activations: the layer against a written-out one, and what a checkpoint with it may hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.schemes.int8 import OFF_GRID, weight_scale
from foundation.schemes.int8_weights import WRONG_SCALES, Int8WeightLinear, WeightScales
from foundation.schemes.weight_only import dequantized_once


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(seed: int, outputs: int, inputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    layer.weight.data, layer.bias.data = random(seed, outputs, inputs), random(seed + 1, outputs)
    return layer


def answers(layer: nn.Linear, scale: Tensor, rows: Tensor) -> np.ndarray:
    """Rounds each weight, and multiplies and adds in float64."""
    found = np.zeros((len(rows), layer.out_features))
    for n, o in np.ndindex(found.shape):
        total = float(layer.bias[o])
        for i in range(layer.in_features):
            code = np.clip(np.rint(np.float32(layer.weight[o, i]) / np.float32(scale[o])), -127, 127)
            total += float(rows[n, i]) * float(scale[o]) * code
        found[n, o] = total
    return found


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 12), st.sampled_from([0.5, 1.0, 3.0]))
def test_the_layer_multiplies_the_grid_weights_in_float(seed: int, outputs: int, inputs: int, clipped: float) -> None:
    float_layer, rows = linear(seed, outputs, inputs), random(seed + 2, 3, inputs)
    scales = WeightScales(clipped * weight_scale(float_layer.weight.detach(), 127))
    layer = scales.module("layer", float_layer)
    with torch.no_grad():
        np.testing.assert_allclose(layer(rows), answers(float_layer, scales.weight_scale, rows), rtol=1e-5, atol=1e-5)
    assert layer.weight.dtype == torch.int8
    grid = scales.on_grid(float_layer.weight.detach())
    assert torch.equal(scales.on_grid(grid), grid)
    assert torch.equal(scales.codes(grid), layer.weight)


def test_it_answers_in_the_type_of_its_input() -> None:
    layer = WeightScales(torch.ones(4)).module("layer", linear(0, 4, 6))
    assert layer(random(1, 2, 6).bfloat16()).dtype == torch.bfloat16


def test_weights_dequantized_once_are_let_go() -> None:
    layer = WeightScales(torch.full((4,), 0.01)).module("layer", linear(0, 4, 6))
    assert isinstance(layer, Int8WeightLinear)
    model, rows = nn.Sequential(layer), random(1, 2, 6)
    before = model(rows)
    with dequantized_once(model):
        layer.weight.zero_()  # the codes are not read again
        assert torch.equal(model(rows), before)
    assert layer.cached_OI is None
    assert not torch.equal(model(rows), before)


def test_scales_that_do_not_fit_are_named() -> None:
    weight = random(0, 4, 6)
    scales = WeightScales(weight_scale(weight, 127))
    grid = scales.on_grid(weight)
    assert scales.problem(grid) is None
    assert scales.problem(grid.bfloat16()) is None
    assert scales.problem(1.01 * grid) == OFF_GRID
    for wrong in (torch.ones(3), -scales.weight_scale, scales.weight_scale.clone().fill_(float("nan"))):
        assert replace(scales, weight_scale=wrong).problem(grid) == WRONG_SCALES
    with pytest.raises(ValueError, match="weight_bits must be 8"):
        WeightScales.read("layer", {"layer.weight_scale": scales.weight_scale}, {"weight_bits": 7})
