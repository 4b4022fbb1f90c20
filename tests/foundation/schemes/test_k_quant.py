"""Int4 weights with two-level scales and offsets: the layer against the formula, files, and what belongs to other weights.

python -m pytest tests/foundation/schemes/test_k_quant.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.layers.stored_linear import rows_of
from foundation.schemes.checkpoint import load_quantization, save_quantization
from foundation.schemes.int4 import Int4Scales, unpack
from foundation.schemes.int4_by_int8 import BlockScales, in_blocks
from foundation.schemes.two_level import of_groups

KINDS = (Int4Scales, BlockScales)


def k_quant(seed: int, outputs: int, inputs: int, group: int, kind: type[Int4Scales] = Int4Scales, *, offsets: bool = True) -> Int4Scales:
    """Returns random two-level scales, with offsets up to 40 steps or zero points."""
    generator, groups = torch.Generator().manual_seed(seed), -(-inputs // group)
    blocks = -(-groups // 8)
    a, b = (torch.randint(low, 64, (outputs, groups), generator=generator) for low in (1, 0))
    d, e = (torch.randint(16, 32, (outputs, blocks), generator=generator) * 2.0**-12 for _ in range(2))
    if not offsets:
        zero = torch.randint(-8, 8, (outputs, groups), generator=generator, dtype=torch.int8)
        return kind(a * of_groups(d, groups), group, zero, weight_super_scale=d)
    return kind(a * of_groups(d, groups), group, None, b * of_groups(e, groups), d, e)


def weights(seed: int, scales: Int4Scales, inputs: int) -> Tensor:
    return torch.randn(len(scales.weight_scale), inputs, generator=torch.Generator().manual_seed(seed)) * scales.expanded(inputs) * 8


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 70), st.sampled_from([1, 3, 4, 16]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_layer_equals_the_written_out_one(kind: type[Int4Scales], seed: int, outputs: int, inputs: int, group: int, bias: bool) -> None:
    scales = k_quant(seed, outputs, inputs, group, kind)
    assert scales.weight_offset is not None
    linear = nn.Linear(inputs, outputs, bias)
    linear.weight.data = weights(seed, scales, inputs)
    layer = scales.module("x", linear)
    codes, rounded = unpack(layer.weight.view(torch.uint8), inputs), scales.on_grid(linear.weight.detach())
    expected = np.zeros((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            s, m = (np.float32(value[o, i // group]) for value in (scales.weight_scale, scales.weight_offset))
            u = int(np.clip(np.rint((np.float32(linear.weight[o, i].item()) + m) / s), 0, 15))
            assert int(codes[o, i]) == u - 8
            expected[o, i] = s * np.float32(u) - m
    assert (rounded.numpy() == expected).all()
    assert torch.equal(layer.dequantized(), rounded)
    assert scales.problem(rounded) is None
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(seed))
    read = in_blocks(x, group) if kind is BlockScales else x
    torch.testing.assert_close(layer(x), nn.functional.linear(read, rounded, linear.bias))
    assert "symmetric=False" in repr(layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offsets", [True, False])
def test_grid_weights_give_their_codes_back_in_any_type(dtype: torch.dtype, offsets: bool) -> None:
    scales = k_quant(1, 8, 96, 16, offsets=offsets)
    stored = scales.on_grid(weights(2, scales, 96))
    assert torch.equal(scales.codes(stored.to(dtype).float()), scales.codes(stored))
    assert scales.problem(stored.to(dtype)) is None


@pytest.mark.parametrize("offsets", [True, False])
def test_files_give_the_same_scales_back(offsets: bool, tmp_path: Path) -> None:
    scales = k_quant(3, 6, 50, 4, offsets=offsets)
    save_quantization(tmp_path, {"layer": scales}, {})
    (found,) = load_quantization(tmp_path)[0].values()
    assert isinstance(found, Int4Scales)
    assert found.entry() == scales.entry()
    assert found.entry()["group_scales"] == ("k_quant" if offsets else "two_level")
    assert found.tensors().keys() == scales.tensors().keys()
    assert all(torch.equal(tensor, scales.tensors()[name]) for name, tensor in found.tensors().items())
    part = rows_of(scales, 2, 5)
    assert all(torch.equal(tensor, scales.tensors()[name][2:5]) for name, tensor in part.tensors().items())


def test_entries_and_tensors_that_disagree_are_refused() -> None:
    scales = k_quant(3, 6, 50, 4)
    tensors = {f"x.{name}": tensor for name, tensor in scales.tensors().items()}
    for entry in ({**scales.entry(), "group_scales": "two_level"}, {**scales.entry(), "symmetric": True}):
        with pytest.raises(ValueError, match=r"group_scales must be|symmetric must be"):
            Int4Scales.read("x", tensors, entry)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        Int4Scales.read("x", {**tensors, "x.weight_zero_point": torch.zeros(6, 13, dtype=torch.int8)}, scales.entry())


def test_numbers_of_other_weights_are_reported() -> None:
    scales = k_quant(4, 6, 50, 4)
    stored = scales.on_grid(weights(4, scales, 50))
    assert scales.weight_offset is not None
    assert scales.weight_super_scale is not None
    assert scales.weight_super_offset is not None
    wrong = [
        replace(scales, weight_super_scale=scales.weight_super_scale * 2),
        replace(scales, weight_super_offset=scales.weight_super_offset * 1.5),
        replace(scales, weight_super_offset=scales.weight_super_offset[:, :1]),
        replace(scales, weight_offset=-scales.weight_offset - 1, weight_super_offset=None),
        replace(scales, weight_offset=scales.weight_offset[:, :-1]),
        replace(scales, weight_offset=None),
    ]
    assert ["6 bits" in str(one.problem(stored)) for one in wrong] == [True] * len(wrong)
    assert "not on the grid" in str(replace(scales, weight_offset=scales.weight_offset.flip(0), weight_super_offset=None).problem(stored))


def test_formats_without_offsets_refuse_them() -> None:
    scales = k_quant(5, 2, 32, 16)
    with pytest.raises(InputError, match="real offsets"):
        scales.stored(scales.codes(weights(5, scales, 32)))


@pytest.mark.parametrize(
    ("scales", "bits"),
    [
        (Int4Scales(torch.ones(3, 16), 32), 4 + 32 / 32),
        (Int4Scales(torch.ones(3, 16), 32, torch.zeros(3, 16, dtype=torch.int8)), 4 + 36 / 32),
        (k_quant(0, 3, 512, 32, offsets=False), 4 + (6 + 4) / 32 + 16 / 256),
        (k_quant(0, 3, 512, 32), 4.5),  # as Q4_K
        (k_quant(0, 1, 576, 32), 4 + 12 / 32 + 3 * 32 / 576),  # a shorter last super-block
    ],
)
def test_bits_of_a_weight(scales: Int4Scales, bits: float) -> None:
    assert scales.stored_bits() / (len(scales.weight_scale) * scales.weight_scale.shape[1] * 32) == pytest.approx(bits)
