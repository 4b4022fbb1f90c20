from collections.abc import Collection

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foundation.schemes.int8 import LayerScales, int8_linear, levels, on_grid, weight_scale
from quantize.sensitivity import Part, passes, quantized_part, rounded_input, scan


def test_figures_of_a_scan_are_those_of_their_definition() -> None:
    cost = {"a": 1.0, "b": 4.0, "c": 2.0}
    share = {"both": 1.0, "weights": 0.25, "inputs": 0.5}
    told: list[int] = []

    def measure(names: Collection[str], part: Part) -> float:
        return share[part] * (sum(cost[name] for name in names) + (3 if {"a", "c"} <= set(names) else 0))  # a and c amplify each other

    found = scan(["a", "b", "c"], measure, told.append)
    assert [layer.name for layer in found] == ["c", "b", "a"] == [layer["name"] for layer in (row.as_row() for row in found)]
    by_name = {layer.name: layer for layer in found}
    assert {name: layer.alone for name, layer in by_name.items()} == cost
    assert {name: layer.gain for name, layer in by_name.items()} == {"a": 4.0, "b": 4.0, "c": 5.0}
    assert (by_name["c"].weights, by_name["c"].inputs) == (0.5, 1.0)
    assert sum(told) == passes(["a", "b", "c"]) == 13


def layer(seed: int, smooth: bool) -> tuple[nn.Linear, LayerScales]:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(12, 5)
    linear.weight.data = torch.randn(5, 12, generator=generator)
    smooth_I = torch.rand(12, generator=generator) + 0.5 if smooth else None
    scale_O = weight_scale(linear.weight.data * (1 if smooth_I is None else smooth_I), 127)
    return linear, LayerScales(scale_O, torch.tensor(0.05), 8, smooth_I)


@given(st.integers(0, 1000), st.booleans())
def test_both_halves_together_are_the_int8_layer(seed: int, smooth: bool) -> None:
    linear, scales = layer(seed, smooth)
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(seed + 1))
    weights = quantized_part("fc", linear, scales, "weights")
    torch.testing.assert_close(weights(rounded_input(x, scales)), int8_linear("fc", linear, scales)(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(quantized_part("fc", linear, scales, "inputs")(x), linear(rounded_input(x, scales)), atol=0, rtol=0)
    torch.testing.assert_close(quantized_part("fc", linear, scales, "both")(x), int8_linear("fc", linear, scales)(x), atol=0, rtol=0)


def test_the_weights_half_leaves_the_input_alone() -> None:
    linear, scales = layer(0, smooth=False)
    x = torch.randn(3, 12)
    expected = nn.functional.linear(x, on_grid(linear.weight.data, scales.weight_scale, levels(8)), linear.bias)
    torch.testing.assert_close(quantized_part("fc", linear, scales, "weights")(x), expected)
