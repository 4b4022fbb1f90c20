"""The files beside a quantized checkpoint, for every scheme; those of w8a8 are damaged in test_int8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import apply_quantization, load_quantization, save_quantization
from foundation.schemes.int4 import Int4Scales, group_range, group_scale
from foundation.schemes.int4_by_int8 import BlockScales
from foundation.schemes.int8 import DynamicScales, weight_scale
from foundation.schemes.scales import Grid, Scales
from foundation.schemes.table import SCHEMES

INPUT = torch.tensor(0.02)


FORMS = (*SCHEMES, "w4a16, zero points")


def pair() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3, bias=False)), "head": nn.Linear(3, 2)})


def scales_of(scheme: str, linear: nn.Linear) -> Scales:
    weight = linear.weight.detach()
    ranges = group_range(weight, 4)
    special = {
        "w8a8-dynamic": lambda: DynamicScales(weight_scale(weight, 63), 7, torch.ones(weight.shape[1])),
        "w4a16": lambda: Int4Scales(group_scale(weight, 4), 4),
        "w4a8-block": lambda: BlockScales(group_scale(weight, 4), 4),
        "w4a16, zero points": lambda: Int4Scales(ranges.scale, 4, ranges.zero_point),
    }
    if scheme in special:
        return special[scheme]()
    row = SCHEMES[scheme]
    return row.scales().chosen(Grid(weight_scale(weight, row.largest_weight)), INPUT, row.weight_bits, 0, None)


def quantized(scheme: str, folder: Path) -> nn.Module:
    model = pair()
    scales = {f"encoder.{i}": scales_of(scheme, model["encoder"][i]) for i in range(2)}
    for name, found in scales.items():
        linear = model.get_submodule(name)
        linear.weight.data = found.on_grid(linear.weight.detach())
    save_quantization(folder, scales, {"head": "head"})
    save_file(model.state_dict(), folder / "model.safetensors")
    return model


@pytest.mark.parametrize("scheme", FORMS)
def test_what_is_saved_comes_back_and_puts_the_layers_in_place(tmp_path: Path, scheme: str) -> None:
    model = quantized(scheme, tmp_path)
    layers, kept = load_quantization(tmp_path)
    document = json.loads((tmp_path / "quantization.json").read_text())
    assert (document["schema"], document["scheme"], Checkpoint(tmp_path).scheme, kept) == (
        1,
        *2 * (scheme.partition(",")[0],),
        {"head": "head"},
    )
    expected = {}
    for name, scales in layers.items():
        original = scales_of(scheme, pair().get_submodule(name))
        assert type(scales) is type(original)
        assert (scales.entry(), document["layers"][name]) == (original.entry(), original.entry())
        for key, tensor in original.tensors().items():
            assert torch.equal(scales.tensors()[key], tensor)
        expected[name] = scales.module(name, pair().get_submodule(name))
    apply_quantization(model, tmp_path)
    for name, module in expected.items():
        found = model.get_submodule(name)
        assert type(found) is type(module)
        x = torch.randn(5, found.in_features)
        assert torch.equal(found(x), module(x))
    assert isinstance(model["head"], nn.Linear)


@pytest.mark.parametrize("scheme", FORMS)
def test_scales_of_another_checkpoint_are_refused(tmp_path: Path, scheme: str) -> None:
    model = quantized(scheme, tmp_path)
    model["encoder"][1].weight.data *= 1.003
    with pytest.raises(InputError, match=r"encoder\.1.*not on the grid"):
        apply_quantization(model, tmp_path)
    model = quantized(scheme, tmp_path)
    model["encoder"][1] = nn.Linear(4, 5)
    with pytest.raises(InputError, match=r"encoder\.1.*must be positive numbers"):
        apply_quantization(model, tmp_path)


@pytest.mark.parametrize(
    ("scheme", "entry", "message"),
    [
        ("w8a8-dynamic", {"weight_bits": 4}, "weight_bits must be 7 or 8"),
        ("w4a16", {"weight_bits": 8, "group_size": 4}, "weight_bits must be 4"),
        ("w4a16", {"weight_bits": 4, "group_size": 0}, "group_size"),
        ("w4a16", {"weight_bits": 4}, "group_size"),
        ("w4a8-block", {"weight_bits": 8, "group_size": 4}, "weight_bits must be 4"),
        ("w4a16", {"weight_bits": 4, "group_size": 4, "symmetric": False}, "symmetric must be false for layers with zero points"),
        ("fp8", {"weight_bits": 4}, "weight_bits must be 8"),
        ("w3a3", {}, "scheme w3a3"),
    ],
)
def test_a_damaged_entry_is_refused_in_one_line(tmp_path: Path, scheme: str, entry: dict[str, Any], message: str) -> None:
    quantized(scheme if scheme in SCHEMES else "w8a8", tmp_path)
    file = tmp_path / "quantization.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"scheme": scheme, "layers": {"encoder.0": entry}}))
    with pytest.raises(InputError, match=message) as refused:
        load_quantization(tmp_path)
    assert len(refused.value.lines) == 1
    assert "\n" not in str(refused.value)


def test_a_float_checkpoint_has_no_scheme_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path).scheme is None
    (tmp_path / "quantization.json").write_text("{")
    with pytest.raises(InputError, match="quantize again"):
        _ = Checkpoint(tmp_path).scheme


def test_a_checkpoint_has_one_scheme(tmp_path: Path) -> None:
    model = pair()
    layers = {f"encoder.{i}": scales_of(scheme, model["encoder"][i]) for i, scheme in enumerate(("w8a8", "fp8"))}
    with pytest.raises(ValueError, match="too many values"):
        save_quantization(tmp_path, layers, {})
