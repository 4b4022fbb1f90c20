"""Groups of weights of one sign, of zeros, and with one weight that is not 0: no method and no format loses a part of their range.

A group moves by at most half a step of (largest - smallest, each with 0) / levels, whatever the signs; a symmetric one of largest / 7.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from export.compressed_tensors import converted
from export.gguf.blocks import encode
from foundation.schemes.int4 import Int4Scales, grouped
from foundation.schemes.int8 import DynamicScales, LayerScales, weight_scale
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.scales import Grid
from foundation.schemes.tables import on_table_grid, row_scale
from quantize.awq import choose
from quantize.group_scales import Groups
from quantize.moments import Moments, output_errors
from quantize.ptq import mse_weight_scale
from quantize.rounding.adaround import adaround
from quantize.rounding.autoround import Iterate
from quantize.rounding.blockwise import start_of
from quantize.rounding.rounding import round_weight

SIZE, CLOSE = 32, 1 + 1e-5
Signs = Literal["positive", "negative", "zero", "one positive", "one negative", "mixed"]
SIGNS: tuple[Signs, ...] = ("positive", "negative", "zero", "one positive", "one negative", "mixed")


def group(signs: Signs, exponent: int, seed: int) -> Tensor:
    """Weights between 2^exponent / 10 and 2^exponent in size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (0.1 + 0.9 * torch.rand(SIZE, generator=generator)) * 2.0**exponent
    place = torch.arange(SIZE) == int(torch.randint(SIZE, (), generator=generator))
    factors: dict[str, Tensor | int] = {"positive": 1, "negative": -1, "zero": 0, "one positive": place, "one negative": -1 * place}
    return sizes * factors.get(signs, torch.where(torch.rand(SIZE, generator=generator) < 0.5, -1, 1))


KINDS = st.tuples(st.sampled_from(SIGNS), st.integers(-8, 3), st.integers(0, 2**31))
ROWS = st.lists(st.lists(KINDS, min_size=3, max_size=3), min_size=1, max_size=4)
"""Weights [O, 96] of three groups."""


def weight_of(rows: list[list[tuple[Signs, int, int]]]) -> Tensor:
    return torch.stack([torch.cat([group(*kind) for kind in row]) for row in rows])


def step_of(weight: Tensor, *, symmetric: bool) -> Tensor:
    """Step of each group, [O, G]."""
    groups = grouped(weight, SIZE)
    if symmetric:
        return groups.abs().amax(dim=2) / 7
    return (groups.amax(dim=2).clamp(min=0) - groups.amin(dim=2).clamp(max=0)) / 15


def moments(seed: int) -> Moments:
    generator = torch.Generator().manual_seed(seed)
    found = Moments()
    found.add(torch.randn(200, 3 * SIZE, generator=generator) @ torch.randn(3 * SIZE, 3 * SIZE, generator=generator))
    return found


def scales_of(weight: Tensor, *, symmetric: bool, **how: Any) -> Int4Scales:
    return Int4Scales.of_grid(Groups(SIZE, symmetric, **how).grid(weight), SIZE)


@pytest.mark.parametrize("symmetric", [True, False])
@given(ROWS)
@settings(max_examples=15, deadline=None)
def test_whole_ranges_move_a_weight_by_half_a_step(symmetric: bool, rows: Any) -> None:
    weight = weight_of(rows)
    scales = scales_of(weight, symmetric=symmetric, range_by="minmax")
    moved = grouped(scales.on_grid(weight) - weight, SIZE).abs().amax(dim=2)
    assert (moved <= step_of(weight, symmetric=symmetric) / 2 * CLOSE).all()


@pytest.mark.parametrize("symmetric", [True, False])
@given(ROWS)
@settings(max_examples=15, deadline=None)
def test_searched_ranges_have_no_larger_error_than_half_a_step_of_all(symmetric: bool, rows: Any) -> None:
    weight = weight_of(rows)
    grid = Groups(SIZE, symmetric).searched(weight, None)
    moved = grouped(Int4Scales.of_grid(grid, SIZE).on_grid(weight) - weight, SIZE)
    count = (grouped(weight, SIZE) != 0).sum(dim=2)  # zeros do not move
    assert (moved.square().sum(dim=2) <= count * (step_of(weight, symmetric=symmetric) / 2).square() * CLOSE).all()


@pytest.mark.parametrize(("scales", "symmetric"), [("two_level", True), ("two_level", False), ("k_quant", False)])
@pytest.mark.parametrize("range_by", ["minmax", "weights"])
@given(ROWS)
@settings(max_examples=10, deadline=None)
def test_two_level_numbers_add_a_step_of_their_super_block(range_by: Any, scales: Any, symmetric: bool, rows: Any) -> None:
    """A scale is a multiple of d, about the largest one of the super-block / 63; so is an offset, of its own e."""
    weight = weight_of(rows)
    found = scales_of(weight, symmetric=symmetric, range_by=range_by, scales=scales)
    moved, step = grouped(found.on_grid(weight) - weight, SIZE), step_of(weight, symmetric=symmetric)
    shared = step.amax(dim=1, keepdim=True) / 63 * 1.1
    offsets = 0 if scales != "k_quant" else grouped(weight, SIZE).amin(dim=2).clamp(max=0).abs().amax(dim=1, keepdim=True) / 63 * 1.1
    most = (step + shared + offsets) / 2
    if range_by == "minmax":
        assert (moved.abs().amax(dim=2) <= most * CLOSE).all()
    assert (moved.square().sum(dim=(1, 2)) <= SIZE * (1.04 * most + shared).square().sum(dim=1)).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["nearest", "gptq", "adaround"])
@given(ROWS, st.integers(0, 2**31))
@settings(max_examples=5, deadline=None)
def test_roundings_by_outputs_have_no_larger_error_than_half_a_step(method: Any, symmetric: bool, rows: Any, seed: int) -> None:
    """Of the outputs: the error of the nearest codes of the whole range, of which the test above says how large it may be."""
    weight, hessian = weight_of(rows), moments(seed).hessian_II
    scales = scales_of(weight, symmetric=symmetric, range_by="minmax")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantize.rounding.rounding.adaround", lambda *given: adaround(*given, steps=20))
        rounded, errors = round_weight(weight, scales, hessian, method)
    nearest = output_errors(weight, scales.on_grid(weight), hessian)
    assert (output_errors(weight, rounded, hessian) <= nearest * (1 + 1e-3) + 1e-9).all()
    assert errors["error"] <= errors["error_nearest"] * CLOSE
    assert (rounded[weight == 0] == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
@given(ROWS, st.integers(0, 2**31))
@settings(max_examples=5, deadline=None)
def test_awq_and_autoround_start_with_whole_ranges(symmetric: bool, rows: Any, seed: int) -> None:
    weight, observed = weight_of(rows), moments(seed)
    groups = Groups(SIZE, symmetric, "outputs")
    *_, errors = choose([weight], observed, groups, (0.0,))
    assert errors["error"] <= errors["error_before"] * CLOSE
    half = Int4Scales.of_grid(Groups(SIZE, symmetric, "minmax").grid(weight), SIZE)
    start = Iterate(start_of(weight, half)).weight()  # learning keeps it unless another iterate is better
    assert (grouped(start - weight, SIZE).abs().amax(dim=2) <= step_of(weight, symmetric=symmetric) / 2 * CLOSE).all()


@given(ROWS)
@settings(max_examples=15, deadline=None)
def test_rows_of_8_bits_move_by_half_a_step(rows: Any) -> None:
    weight = weight_of(rows)
    step, count = weight.abs().amax(dim=1) / 127, (weight != 0).sum(dim=1)
    whole = weight_scale(weight, 127)
    for scales in (LayerScales(whole, torch.tensor(1.0), 8), DynamicScales(whole, 8), WeightScales(whole)):
        assert ((scales.on_grid(weight) - weight).abs().amax(dim=1) <= step / 2 * CLOSE).all()
    searched = DynamicScales(mse_weight_scale(weight, 127), 8).on_grid(weight)
    assert ((searched - weight).square().sum(dim=1) <= count * (step / 2).square() * CLOSE).all()
    assert ((on_table_grid(weight, row_scale(weight)) - weight).abs().amax(dim=1) <= step / 2 * CLOSE).all()


@pytest.mark.parametrize("symmetric", [True, False])
@given(ROWS)
@settings(max_examples=10, deadline=None)
def test_files_of_other_programs_hold_the_same_weights(symmetric: bool, rows: Any) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    weight = weight_of(rows)
    scales = scales_of(weight, symmetric=symmetric, range_by="minmax")
    stored = scales.on_grid(weight)
    encoded = encode(stored, scales, "F16")
    assert encoded.kind == ("Q4_0" if symmetric else "Q4_1")
    read = torch.from_numpy(dequantize(encoded.data, GGMLQuantizationType[encoded.kind]))
    assert ((read - stored).abs() <= 2e-3 * stored.abs().amax(dim=1, keepdim=True)).all()

    tensors = converted({"a.weight": stored}, {"a": scales})
    codes = unpack_from_int32(tensors["a.weight_packed"], 4, stored.shape)
    zero: Tensor | int = 0
    if not symmetric:  # eight rows in an int32; the function of compressed-tensors takes no single row
        packed = tensors["a.weight_zero_point"][:, None] >> 4 * torch.arange(8)[None, :, None]
        zero = (packed & 15).flatten(0, 1)[: len(stored)] - 8
    grid = Grid(tensors["a.weight_scale"])
    steps = grouped(codes.float(), SIZE) - (zero if isinstance(zero, int) else zero.float()[:, :, None])
    assert torch.equal((steps * grid.scale[:, :, None]).flatten(1), stored)
