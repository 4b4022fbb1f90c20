"""Int4 weights by int8 activations in blocks, against a loop in integers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.schemes.int4 import Int4Scales, group_range, group_scale
from foundation.schemes.int4_by_int8 import BlockLinear, BlockScales, in_blocks
from foundation.schemes.table import facts_of
from quantize.sensitivity import rounded_input


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def answers(layer: nn.Linear, scales: Int4Scales, rows: Tensor) -> np.ndarray:
    """Multiplies codes by codes in integers, block by block, and adds the scaled sums in float64."""
    code_OI = scales.codes(layer.weight.detach()).numpy().astype(int)
    size, found = scales.group_size, np.zeros((len(rows), layer.out_features))
    for n, o in np.ndindex(found.shape):
        total = float(layer.bias[o])
        for group, start in enumerate(range(0, layer.in_features, size)):
            block = rows[n, start : start + size].numpy()
            step = np.abs(block).max() / np.float32(127) or np.float32(1)
            zero = 0 if scales.weight_zero_point is None else int(scales.weight_zero_point[o, group])
            sums = int((np.rint(block / step).astype(int) * (code_OI[o, start : start + size] - zero)).sum())
            total += sums * float(step) * float(scales.weight_scale[o, group])
        found[n, o] = total
    return found


@given(
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([1, 3, 16]),
    st.booleans(),
    st.sampled_from([0.0, 1e-20, 1.0, 1e20]),
)
def test_the_layer_multiplies_codes_by_codes(seed: int, outputs: int, inputs: int, group: int, symmetric: bool, size: float) -> None:
    layer = nn.Linear(inputs, outputs)
    layer.weight.data, layer.bias.data = random(seed, outputs, inputs), random(seed + 1, outputs)
    grid = group_range(layer.weight.detach(), group)
    scales = BlockScales(group_scale(layer.weight.detach(), group), group) if symmetric else BlockScales(grid.scale, group, grid.zero_point)
    rows = random(seed + 2, 3, inputs) * torch.tensor([[1.0], [size], [0.0]])
    made = scales.module("layer", layer)
    assert type(made) is BlockLinear
    with torch.no_grad():
        expected = answers(layer, scales, rows)
        np.testing.assert_allclose(made(rows), expected, rtol=1e-5, atol=1e-5 * max(1, size * 15))
    assert torch.equal(rounded_input(rows, scales), in_blocks(rows, group))
    assert facts_of(scales).activations == "blocks"


def test_an_outlier_rounds_its_own_block_alone() -> None:
    x = torch.full((1, 64), 0.3)
    x[0, 0] = 127.0
    rounded = in_blocks(x, 32)
    assert rounded[0, 0] == 127
    assert bool((rounded[0, 1:32] == 0).all())  # 0.3 of a step of 1
    torch.testing.assert_close(rounded[0, 32:], x[0, 32:])


def test_it_answers_in_the_type_of_its_input() -> None:
    layer = BlockScales(torch.ones(4, 1), 16).module("layer", nn.Linear(6, 4))
    assert layer(random(1, 2, 6).bfloat16()).dtype == torch.bfloat16
