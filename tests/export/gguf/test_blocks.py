"""Blocks of GGUF against a loop over their bytes, and against the reader of the package `gguf`."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from export.gguf.blocks import BLOCK, Encoded, encode
from foundation.schemes.fp8 import Fp8Scales
from foundation.schemes.int4 import Int4Scales, group_range, group_scale
from foundation.schemes.int8 import DynamicScales, LayerScales, weight_scale
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.scales import Scales
from foundation.schemes.tables import on_table_grid, row_scale
from quantize.group_scales import Groups

WEIGHT = torch.randn(6, 128, generator=torch.Generator().manual_seed(0)) * 0.05


def grid(scheme: str, weight: Tensor, group: int = 64) -> Scales:
    return {
        "w8a8": lambda: LayerScales(weight_scale(weight, 127), torch.tensor(0.1), 8),
        "w8a8-dynamic": lambda: DynamicScales(weight_scale(weight, 63), 7),
        "w8a16": lambda: WeightScales(0.9 * weight_scale(weight, 127)),
        "w4a16": lambda: Int4Scales(0.9 * group_scale(weight, group), group),
        "zero points": lambda: Int4Scales(0.9 * group_range(weight, group).scale, group, group_range(weight, group).zero_point),
        "two_level": lambda: Int4Scales.of_grid(Groups(group, scales="two_level").grid(weight), group),
        "two_level, zero points": lambda: Int4Scales.of_grid(Groups(group, False, scales="two_level").grid(weight), group),
        "k_quant": lambda: Int4Scales.of_grid(Groups(group, False, scales="k_quant").grid(weight), group),
        "fp8": lambda: Fp8Scales(weight_scale(weight, 448), torch.tensor(0.1)),
    }[scheme]()


def half(value: float) -> float:
    return float(np.float16(value))


def unpacked(encoded: Encoded) -> list[list[tuple[float, float, int]]]:
    """Scale, minimum and integer of every weight, read byte by byte."""
    sizes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
    rows = []
    for row in encoded.data.tolist():
        found: list[tuple[float, float, int]] = []
        for start in range(0, len(row), sizes[encoded.kind]):
            block = bytes(row[start : start + sizes[encoded.kind]])
            (scale,) = struct.unpack("<e", block[:2])
            if encoded.kind == "Q8_0":
                found += [(scale, 0.0, code) for code in struct.unpack("<32b", block[2:])]
                continue
            minimum = struct.unpack("<e", block[2:4])[0] if encoded.kind == "Q4_1" else -8 * scale
            quarters = block[-16:]
            found += [(scale, minimum, byte & 15) for byte in quarters] + [(scale, minimum, byte >> 4) for byte in quarters]
        rows.append(found)
    return rows


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [("w8a8", "Q8_0"), ("w8a8-dynamic", "Q8_0"), ("w8a16", "Q8_0"), ("w4a16", "Q4_0"), ("zero points", "Q4_1")],
)
@pytest.mark.parametrize("group", [32, 64])
def test_every_weight_has_its_integer_and_the_half_of_its_scale(scheme: str, kind: str, group: int) -> None:
    scales = grid(scheme, WEIGHT, group)
    stored = scales.on_grid(WEIGHT)
    encoded = encode(stored, scales, "F16")
    assert (encoded.kind, encoded.origin) == (kind, "codes")
    read = dequantize(encoded.data, GGMLQuantizationType[kind])
    shared, grouped, zeros = scales.weight_scale, isinstance(scales, Int4Scales), getattr(scales, "weight_zero_point", None)
    for o, row in enumerate(unpacked(encoded)):
        for i, (scale, minimum, code) in enumerate(row):
            exact = float(shared[o, i // group] if grouped else shared[o])
            zero = int(zeros[o, i // group]) + 8 if zeros is not None else 8 if grouped else 0
            assert scale == half(exact)
            assert code - zero == round(float(stored[o, i]) / exact)
            if zeros is not None:
                assert minimum == half(-scale * zero)
                assert read[o, i] == np.float32(scale) * np.float32(code) + np.float32(minimum)
            else:
                assert read[o, i] == np.float32(scale) * np.float32(code - zero)


def by_hand(data: np.ndarray, inputs: int) -> np.ndarray:
    """Reads rows of Q4_K weight by weight, from bytes: as `get_scale_min_k4` of llama.cpp says."""
    rows = np.zeros((len(data), inputs), np.float32)
    for o, row in enumerate(data):
        for k in range(inputs // 256):
            block = bytes(row[144 * k : 144 * (k + 1)])
            d, e = struct.unpack("<ee", block[:4])
            packed, codes = block[4:16], block[16:]
            for i in range(256):
                j = i // 32
                if j < 4:
                    a, b = packed[j] & 63, packed[j + 4] & 63
                else:
                    a = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4)
                    b = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4)
                byte = codes[32 * (i // 64) + i % 32]
                code = byte & 15 if i % 64 < 32 else byte >> 4
                rows[o, 256 * k + i] = np.float32(d) * np.float32(a) * np.float32(code) - np.float32(e) * np.float32(b)
    return rows


@pytest.mark.parametrize("group", [32, 64, 256])
@pytest.mark.parametrize("inputs", [256, 768, 1024])
def test_k_quants_are_blocks_of_q4_k_to_the_bit(group: int, inputs: int) -> None:
    weight = torch.randn(5, inputs, generator=torch.Generator().manual_seed(inputs)) * torch.linspace(0.01, 0.3, inputs) + 0.02
    weight[1] = 0
    weight[2, 7] = 50.0
    scales = grid("k_quant", weight, group)
    stored = scales.on_grid(weight)
    encoded = encode(stored, scales, "F16")
    assert (encoded.kind, encoded.origin, encoded.changed_scales) == ("Q4_K", "codes", 0)
    assert encoded.data.shape == (5, inputs // 256 * 144)  # 4.5 bits a weight
    assert np.array_equal(dequantize(encoded.data, GGMLQuantizationType.Q4_K), stored.numpy())
    assert np.array_equal(by_hand(encoded.data, inputs), stored.numpy())
    order = torch.tensor([3, 1, 0, 4, 2])
    turned = encode(stored, scales, "F16", order)
    assert np.array_equal(dequantize(turned.data, GGMLQuantizationType.Q4_K), stored[order].numpy())


@pytest.mark.parametrize(("scheme", "kind"), [("k_quant", "Q4_1"), ("two_level", "Q4_0")])
@pytest.mark.parametrize(("inputs", "group"), [(64, 32), (288, 32), (576, 64)])
def test_two_level_numbers_in_other_blocks_are_those_of_the_run_to_the_bit(scheme: str, kind: str, inputs: int, group: int) -> None:
    weight = torch.randn(5, inputs, generator=torch.Generator().manual_seed(inputs)) * torch.linspace(0.001, 0.3, inputs)
    scales = grid(scheme, weight, group)
    stored = scales.on_grid(weight)
    encoded = encode(stored, scales, "F16")
    assert (encoded.kind, encoded.origin, encoded.changed_scales) == (kind, "codes", 0)
    assert np.array_equal(dequantize(encoded.data, GGMLQuantizationType[kind]), stored.numpy())


def test_two_level_scales_stay_with_zero_points_too() -> None:
    scales = grid("two_level, zero points", WEIGHT, 32)
    encoded = encode(scales.on_grid(WEIGHT), scales, "F16")
    assert (encoded.kind, encoded.origin, encoded.changed_scales) == ("Q4_1", "codes", 0)
    read = dequantize(encoded.data, GGMLQuantizationType.Q4_1)
    assert isinstance(scales, Int4Scales)
    assert (np.abs(read - scales.on_grid(WEIGHT).numpy()) <= 0.004 * scales.expanded(128).numpy()).all()


def test_changed_scales_are_counted_and_exact_ones_are_not() -> None:
    scale = torch.tensor([0.5, 0.25, 0.1, 0.125, 1.0, 2.0])
    scales = WeightScales(scale)
    encoded = encode(scales.on_grid(WEIGHT * 100), scales, "F16")
    assert (encoded.scales, encoded.changed_scales) == (24, 4)  # a row of 0.1, in four blocks
    assert encoded.largest_change == pytest.approx(abs(half(0.1) - 0.1) / 0.1, rel=1e-4)
    assert encoded.largest_change <= 2**-11
    ones = WeightScales(torch.full((6,), 2.0**-9))
    stored = ones.on_grid(WEIGHT)
    assert np.array_equal(dequantize(encode(stored, ones, "F16").data, GGMLQuantizationType.Q8_0), stored.numpy())


def test_rows_of_a_table_and_another_order_of_rows() -> None:
    scale, order = row_scale(WEIGHT), torch.tensor([3, 1, 0, 5, 4, 2])
    stored = on_table_grid(WEIGHT, scale)
    for scales, expected in ((scale, stored), (grid("zero points", WEIGHT), grid("zero points", WEIGHT).on_grid(WEIGHT))):
        encoded = encode(expected, scales, "F16", order)
        assert encoded.origin == "codes"
        read = dequantize(encoded.data, GGMLQuantizationType[encoded.kind])
        assert np.abs(read - expected[order].numpy()).max() < 2**-10 * np.abs(expected.numpy()).max()
    assert np.array_equal(encode(WEIGHT, None, "F32", order).data, WEIGHT[order].numpy())


@pytest.mark.parametrize(
    ("scales", "kind", "reason"),
    [
        (grid("w4a16", WEIGHT, 16), "Q8_0", "groups of 16"),
        (LayerScales(weight_scale(WEIGHT, 127), torch.tensor(0.1), 8, torch.linspace(0.5, 2, 128)), "Q8_0", "smoothing"),
        (grid("fp8", WEIGHT), "F16", "fp8"),
    ],
)
def test_other_grids_are_rounded_again(scales: Scales, kind: str, reason: str) -> None:
    stored = scales.on_grid(WEIGHT)
    encoded = encode(stored, scales, "F16")
    assert (encoded.kind, encoded.origin) == (kind, "rounded")
    assert reason in encoded.reason
    read = dequantize(encoded.data, GGMLQuantizationType[kind])
    largest = stored.abs().reshape(6, -1, BLOCK).amax(dim=2).repeat_interleave(BLOCK, dim=1).numpy()
    assert (np.abs(read - stored.numpy()) <= (0.51 / 127 + 2**-10) * largest).all()


def test_rows_without_whole_blocks_and_scales_beyond_float16_are_floats() -> None:
    narrow = WEIGHT[:, :48]
    scales = WeightScales(weight_scale(narrow, 127))
    encoded = encode(scales.on_grid(narrow), scales, "F16")
    assert (encoded.kind, encoded.origin) == ("F16", "rounded")
    assert "48" in encoded.reason
    for factor in (2.0**-40, 2.0**40):
        scales = WeightScales(weight_scale(WEIGHT * factor, 127))
        encoded = encode(scales.on_grid(WEIGHT * factor), scales, "F16")
        assert "float16" in encoded.reason
        assert encoded.kind == ("F32" if factor > 1 else "F16")


def test_a_tiny_scale_next_to_large_ones_takes_nothing_away() -> None:
    weight = WEIGHT.clone()
    weight[:, :64] *= 2.0**-30  # its scale is below every float16 number, and its weights below what moves an answer
    scales = grid("w4a16", weight)
    encoded = encode(scales.on_grid(weight), scales, "F16")
    assert encoded.origin == "codes"
    read = dequantize(encoded.data, GGMLQuantizationType.Q4_0)
    assert (np.abs(read - scales.on_grid(weight).numpy()) <= 2**-10 * np.abs(weight.numpy()).max(axis=1, keepdims=True)).all()


def test_vectors_and_large_numbers_are_float32() -> None:
    assert encode(WEIGHT[0], None, "F16").kind == "F32"
    assert encode(WEIGHT * 2.0**25, None, "F16").kind == "F32"
    assert encode(WEIGHT, None, "F16").kind == "F16"
    assert encode(WEIGHT, None, "F32").kind == "F32"
