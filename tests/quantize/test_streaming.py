"""Quantization a decoder layer at a time: what quantizing in memory gives, and what each method's order of layers says.

python -m pytest tests/quantize/test_streaming.py
python -m pytest tests/quantize/test_streaming.py -m slow     # memory, in a child process
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.measure import predictions
from foundation.models import streaming
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.fp8 import Fp8Scales
from foundation.schemes.int4 import Int4Scales, group_range, group_scale
from foundation.schemes.int8 import DynamicScales, LayerScales, weight_scale
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.tables import load_tables
from foundation.stage.context import Context
from quantize.quantize import Quantize
from quantize.streamed.stored_layer import grid_dtype
from tests import tiny_language_models as tiny

pytestmark = pytest.mark.whole

IDS = torch.from_numpy(np.stack(tiny.blocks(4, 9).rows)).long()


def written(tmp_path: Path, kind: str, dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    """Writes a model of two layers: what is said of a layer and the one behind it needs no third."""
    depth: dict[str, Any] = {"n_layer" if kind == "gpt2" else "num_hidden_layers": 2}
    return tiny.write(tmp_path / "model", kind, dtype, **depth, **shape)


def quantized(folder: Path, context: Context, **settings: Any) -> tuple[Path, dict[str, Any]]:
    out = context.scratch.parent / f"out-{settings.get('stream')}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    return out, Quantize(**settings).run(Artifact(folder, {}), context, out)


def both(folder: Path, context: Context, **settings: Any) -> tuple[tuple[Path, dict[str, Any]], tuple[Path, dict[str, Any]]]:
    return quantized(folder, context, stream=False, **settings), quantized(folder, context, stream=True, **settings)


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return forward(load(folder), {"input_ids": IDS})


def codes(folder: Path) -> dict[str, torch.Tensor]:
    model = load(folder)
    return {name: model.get_submodule(name).weight.float() for name in load_quantization(folder)[0]}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


NEAREST = [
    {"scheme": "w8a8", "smoothquant": False},
    {"scheme": "w8a8", "smoothquant": False, "calibration": {"method": "minmax"}, "exclude": ("*.1.*proj",)},
    {"scheme": "w8a8-dynamic", "smoothquant": False},
    {"scheme": "w8a16"},
    {"scheme": "w4a16", "group_size": 16, "group_range": "weights"},
    {"scheme": "w4a16", "group_size": 16, "symmetric": False, "group_range": "weights"},
    {"scheme": "fp8"},
    {"scheme": "w4a16", "group_size": 16, "group_scales": "two_level", "symmetric": False, "group_range": "weights"},
    {"scheme": "w4a8-block", "group_size": 16, "group_scales": "k_quant", "symmetric": False, "group_range": "weights"},
]
ID = [" ".join(str(value) for value in settings.values()) for settings in NEAREST]


@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        pytest.param(kind, dtype, settings, id=f"{kind} {name}", marks=[pytest.mark.slow] * (at not in quick))
        for kind, dtype, quick in (("llama", torch.float32, (0, 1, 2, 4, 6, 7)), ("gpt2", torch.bfloat16, (1, 5, 8)))  # all but w8a16
        for at, (name, settings) in enumerate(zip(ID, NEAREST, strict=True))
    ],
)
def test_to_the_nearest_everything_is_equal(
    kind: str, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path, blocks_context: Context
) -> None:
    folder = written(tmp_path, kind, dtype)
    if "exclude" in settings and kind == "gpt2":
        settings = {**settings, "exclude": ("*.1.*c_proj",)}
    (whole, expected), (streamed, found) = both(folder, blocks_context, **settings)
    assert json.loads((streamed / "quantization.json").read_text()) == json.loads((whole / "quantization.json").read_text())
    scales = [load_file(out / "quantization.safetensors") for out in (whole, streamed)]
    assert scales[0].keys() == scales[1].keys()
    assert all(torch.equal(scales[0][name], scales[1][name]) for name in scales[0])
    assert torch.equal(logits(streamed), logits(whole))
    kept, stored, source = tensors(streamed), tensors(whole), tensors(folder)
    assert kept.keys() == source.keys()
    assert all(torch.equal(kept[name], stored[name].to(dtype)) and kept[name].dtype == dtype for name in stored)
    assert all(
        torch.equal(kept[name], tensor)
        for name, tensor in source.items()
        if f"{name.removesuffix('.weight')}.weight_scale" not in scales[0]
    )
    needs_rows = settings["scheme"] in ("w8a8", "fp8")
    assert found["rows"] == (40 if needs_rows else 0)
    for layer, other in zip(found["layers"], expected["layers"], strict=True):
        unmeasured = {"selection_max_abs", "selection_clipped"} | ({"max_abs"} if not needs_rows else set())
        assert layer.keys() - unmeasured == other.keys() - unmeasured
        assert {key: layer[key] for key in layer.keys() - unmeasured} == pytest.approx(
            {key: other[key] for key in other.keys() - unmeasured}
        )
        assert needs_rows or layer["max_abs"] is None
    assert found["float_layers"] == expected["float_layers"]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "shape", "settings"),
    [
        ("llama", {}, {"scheme": "w8a8"}),
        ("llama", {"num_key_value_heads": 4}, {"scheme": "w8a8-dynamic", "smoothquant": {"alpha": 0.5, "prescale": False}}),
        ("gpt2", {}, {"scheme": "w8a8", "smoothquant": {"alpha": 0.7}}),
        ("llama", {"num_key_value_heads": 4}, {"scheme": "w8a8", "smoothquant": {"alpha": 0.5}, "exclude": ("*.0.*v_proj", "*.1.*o_proj")}),
        ("llama", {"num_key_value_heads": 4}, {"scheme": "w4a16", "group_size": 16, "awq": True}),
        ("llama", {"num_key_value_heads": 4}, {"scheme": "w4a16", "group_size": 16, "awq": True, "symmetric": False}),
        *(
            (
                "llama",
                {"num_key_value_heads": 4},
                {"scheme": "w4a16", "group_size": 16, "awq": True, "symmetric": False, "group_scales": kind},
            )
            for kind in ("two_level", "k_quant")
        ),
    ],
)
def test_shifted_as_in_memory(kind: str, shape: dict[str, Any], settings: dict[str, Any], tmp_path: Path, blocks_context: Context) -> None:
    """The sums of a layer's inputs differ in the last bits: layers before it were shifted already."""
    folder = written(tmp_path, kind, **shape)
    (whole, expected), (streamed, found) = both(folder, blocks_context, **settings)
    key = "awq" if settings.get("awq") else "smoothquant"
    for group, other in zip(found[key], expected[key], strict=True):
        assert {name: group[name] for name in ("layers", "into", "alpha", "reason")} == {
            name: other[name] for name in ("layers", "into", "alpha", "reason")
        }
        assert group["error"] == pytest.approx(other["error"], rel=1e-3)
    assert any(group["alpha"] is not None for group in found[key])
    ours, theirs = codes(streamed), codes(whole)
    assert ours.keys() == theirs.keys()
    different = sum(int((ours[name] != theirs[name]).sum()) for name in ours)
    assert different <= 1e-3 * sum(tensor.numel() for tensor in ours.values())
    scales = [load_file(out / "quantization.safetensors") for out in (whole, streamed)]
    assert scales[0].keys() == scales[1].keys()
    for name, scale in scales[0].items():
        torch.testing.assert_close(scales[1][name], scale, rtol=1e-4, atol=0)
    torch.testing.assert_close(logits(streamed), logits(whole), rtol=0, atol=0.02 * float(logits(folder).abs().max()))


LEARNED = [
    ("llama", torch.float32, {"scheme": "w4a16", "rounding": "gptq"}),
    ("llama", torch.bfloat16, {"scheme": "w4a16", "rounding": "adaround"}),
    ("llama", torch.bfloat16, {"scheme": "w4a16", "rounding": "gptq", "symmetric": False}),
    ("llama", torch.bfloat16, {"scheme": "w4a16", "rounding": "gptq", "symmetric": False, "group_scales": "k_quant"}),
    ("llama", torch.float32, {"scheme": "w4a16", "rounding": "adaround", "symmetric": False}),
    ("gpt2", torch.float32, {"scheme": "w8a8", "rounding": "gptq", "smoothquant": False}),
    ("gpt2", torch.float32, {"scheme": "w8a8-dynamic", "rounding": "gptq", "smoothquant": False}),
]


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "dtype", "settings"), LEARNED, ids=lambda value: str(value))
def test_rounded_by_outputs_everything_is_equal(
    kind: str, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path, blocks_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantize.rounding.adaround.adaround.__kwdefaults__", {"steps": 20})
    (whole, expected), (streamed, found) = both(written(tmp_path, kind, dtype), blocks_context, group_size=16, **settings)
    ours, theirs = codes(streamed), codes(whole)
    assert ours.keys() == theirs.keys()
    for name in ours:  # sums may differ in the last bits between layouts of a weight (Conv1D), and then a code flips at a boundary
        flips = (ours[name].int() - theirs[name].int()).abs()
        assert int(flips.max()) <= 1
        assert float(flips.float().mean()) <= (0.005 if kind == "gpt2" else 0)
    scales = [load_file(out / "quantization.safetensors") for out in (whole, streamed)]
    assert all(torch.equal(scales[0][name], scale) for name, scale in scales[1].items())
    assert len({layer["name"].split("h.")[-1].split("layers.")[-1][0] for layer in found["rounding"]["layers"]}) == 2
    for layer, other in zip(found["rounding"]["layers"], expected["rounding"]["layers"], strict=True):
        assert layer["name"] == other["name"]
        assert [layer[key] for key in ("error_nearest", "error")] == pytest.approx(
            [other[key] for key in ("error_nearest", "error")], rel=1e-2 if kind == "gpt2" else 1e-4
        )
        assert layer["error"] <= layer["error_nearest"]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "w8a8", "rounding": "gptq"},
        {"scheme": "w8a8-dynamic", "rounding": "gptq", "smoothquant": {"alpha": 0.5}},
        {"scheme": "w4a16", "group_size": 16, "awq": True, "rounding": "gptq"},
    ],
)
def test_ranges_and_factors_are_those_of_the_float_model_also_where_weights_are_rounded_by_outputs(
    settings: dict[str, Any], tmp_path: Path, blocks_context: Context
) -> None:
    """Sums differ in the last bits after a shift, and GPTQ passes a code that flips on to the next inputs."""
    folder = written(tmp_path, "llama", num_key_value_heads=4)
    (whole, expected), (streamed, found) = both(folder, blocks_context, **settings)
    scales = [load_file(out / "quantization.safetensors") for out in (whole, streamed)]
    assert scales[0].keys() == scales[1].keys()
    for name, scale in scales[0].items():
        torch.testing.assert_close(scales[1][name], scale, rtol=1e-4, atol=0)
    ours, theirs = codes(streamed), codes(whole)
    assert sum(int((ours[name] != theirs[name]).sum()) for name in ours) <= 0.01 * sum(tensor.numel() for tensor in ours.values())
    for layer, other in zip(found["rounding"]["layers"], expected["rounding"]["layers"], strict=True):
        assert layer["error"] == pytest.approx(other["error"], rel=0.02)


@pytest.mark.parametrize(
    "settings", [{"group_range": "outputs"}, {"group_range": "minmax"}, {"rounding": "gptq", "group_range": "weights"}]
)
def test_ranges_are_those_of_memory(settings: dict[str, Any], tmp_path: Path, blocks_context: Context) -> None:
    folder = written(tmp_path, "llama")
    (whole, expected), (streamed, found) = both(folder, blocks_context, scheme="w4a16", group_size=16, symmetric=False, **settings)
    scales = [load_file(out / "quantization.safetensors") for out in (whole, streamed)]
    for name, scale in scales[0].items():
        torch.testing.assert_close(scales[1][name], scale, rtol=1e-5, atol=0)
    assert torch.equal(logits(streamed), logits(whole))
    assert found["rows"] == (0 if settings == {"group_range": "minmax"} else expected["rows"])


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        ("llama", torch.bfloat16, {"scheme": "w4a16", "symmetric": False}),
        ("llama", torch.float32, {"scheme": "w4a16", "symmetric": False, "group_scales": "k_quant"}),
        ("llama", torch.float32, {"scheme": "w4a8-block", "awq": True}),
        ("gpt2", torch.float32, {"scheme": "w8a8"}),
    ],
)
def test_learned_by_the_output_of_a_layer_hardly_anything_differs(
    kind: str, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path, blocks_context: Context
) -> None:
    """Sums differ in the last bits, and a step counts the sign of one near 0 in full."""
    size = min(32, streaming.BATCH_TOKENS // tiny.LENGTH)
    learned = {"rounding": "autoround", "autoround": {"steps": 30, "batch_size": size}}
    folder = written(tmp_path, kind, dtype)
    (whole, expected), (streamed, found) = both(folder, blocks_context, group_size=16, **learned, **settings)
    ours, theirs = codes(streamed), codes(whole)
    assert ours.keys() == theirs.keys()
    assert sum(int((ours[name] != theirs[name]).sum()) for name in ours) <= 0.01 * sum(tensor.numel() for tensor in ours.values())
    scales = [load_file(out / "quantization.safetensors") for out in (whole, streamed)]
    for name, scale in scales[0].items():
        if name.endswith("scale"):
            torch.testing.assert_close(scales[1][name], scale, rtol=0.05, atol=0)
    figures = [one["rounding"]["layers"] for one in (found, expected)]
    assert [layer["name"] for layer in figures[0]] == [layer["name"] for layer in figures[1]]
    assert len(figures[0]) == 2
    for layer, other in zip(*figures, strict=True):
        assert layer["error_nearest"] == pytest.approx(other["error_nearest"], rel=0.02)
        assert layer["error"] == pytest.approx(other["error"], rel=0.02)
        assert layer["error"] <= layer["error_nearest"]
    assert any(layer["error"] < layer["error_nearest"] for layer in figures[0])
    assert [layer["name"] for layer in found["layers"]] == [layer["name"] for layer in expected["layers"]]


def test_rounding_by_outputs_beats_the_nearest(tmp_path: Path, blocks_context: Context) -> None:
    folder = written(tmp_path, "gpt2", torch.bfloat16)
    errors = {}
    for method in ("nearest", "gptq"):
        out, _ = quantized(folder, blocks_context, stream=True, scheme="w4a16", group_size=64, rounding=method)
        errors[method] = float((logits(out) - logits(folder)).square().mean())
    assert errors["gptq"] < errors["nearest"]


def test_a_layer_is_divided_into_parts(tmp_path: Path, blocks_context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few outputs at a time, several shards, rows in small batches: nothing of that changes a code."""
    folder = written(tmp_path, "llama", torch.bfloat16)
    settings = {"stream": True, "scheme": "w4a16", "group_size": 16, "rounding": "gptq"}
    out, _ = quantized(folder, blocks_context, **settings)
    expected = codes(out)
    for name, value in (("ROUND_BYTES", 4 * 32 * 5), ("GPTQ_BYTES", 4 * 32 * 9)):
        monkeypatch.setattr(f"quantize.streamed.stored_layer.{name}", value)
    monkeypatch.setattr("foundation.artifacts.shards.ShardWriter.__init__.__defaults__", ("model", 5000))
    monkeypatch.setattr("foundation.models.layers.stored_linear.StoredLinear.parts.__defaults__", (4 * 32 * 7,))
    out, _ = quantized(folder, blocks_context, **settings)
    assert len(list(out.glob("model-*.safetensors"))) > 3
    assert (out / "model.safetensors.index.json").exists()
    found = codes(out)
    assert sum(int((found[name] != expected[name]).sum()) for name in found) <= 1e-3 * sum(tensor.numel() for tensor in found.values())


@pytest.mark.first(1)
@pytest.mark.parametrize("settings", [*NEAREST[:1], *NEAREST[2:], {"scheme": "w8a8"}], ids=[*ID[:1], *ID[2:], "smoothed"])
def test_a_quantized_checkpoint_is_evaluated_from_its_files(settings: dict[str, Any], tmp_path: Path, blocks_context: Context) -> None:
    folder = written(tmp_path, "llama", torch.bfloat16)
    out, _ = quantized(folder, blocks_context, stream=True, **settings)
    processor, rows = (
        Checkpoint(out).preprocessor("text-generation", tiny.LENGTH, blocks_context.target),
        blocks_context.data.evaluation.rows,
    )
    whole = predictions.predict(load(out), processor, rows, 4)
    found = predictions.predict_streamed(out, processor, rows, 4, tmp_path / "scratch")
    np.testing.assert_allclose(found[..., 0], whole[..., 0], rtol=1e-5, atol=1e-5)
    assert (found[..., 1] == whole[..., 1]).all()


@pytest.mark.parametrize("settings", [{}, {"symmetric": False}, {"symmetric": False, "group_scales": "k_quant"}], ids=str)
def test_layers_that_are_read_in_parts_are_those_of_the_checkpoint(
    settings: dict[str, Any], tmp_path: Path, blocks_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, "llama", torch.bfloat16)
    out, _ = quantized(folder, blocks_context, stream=True, scheme="w4a16", group_size=16, **settings)
    monkeypatch.setattr("foundation.models.layers.stored_linear.StoredLinear.parts.__defaults__", (4 * 32 * 7,))
    found = streaming.StreamedModel(out).forward({"input_ids": IDS})
    torch.testing.assert_close(found, logits(out), rtol=1e-5, atol=1e-5)


def test_weights_that_left_their_grid_are_found(tmp_path: Path, blocks_context: Context) -> None:
    """In bfloat16 a weight may lie as far from the grid as the type moves it, and no further."""
    folder = written(tmp_path, "llama", torch.bfloat16)
    out, _ = quantized(folder, blocks_context, stream=True, scheme="w4a16", group_size=16)
    file, name = out / "model.safetensors", "model.layers.1.mlp.up_proj"
    stored = load_file(file)
    stored[f"{name}.weight"][3, 5] += load_quantization(out)[0][name].tensors()["weight_scale"][3, 0].bfloat16() / 4
    save_file(stored, file, {"format": "pt"})
    for reading in (load, lambda folder: streaming.StreamedModel(folder).forward({"input_ids": IDS})):
        with pytest.raises(InputError, match=f"{name}: its weights are not on the grid"):
            reading(out)


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["w8a8", "w8a8-dynamic", "w8a16", "w4a16", "w4a16, zero points", "fp8"]),
    st.floats(-30, 12),
    st.floats(0, 12),
    st.integers(0, 2**16),
)
def test_codes_come_back_from_the_type_that_is_written(stored: torch.dtype, scheme: str, exponent: float, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(5, 40, generator=generator) * 2**exponent
    smooth_I = (torch.rand(40, generator=generator) * spread).exp2()
    ranges = group_range(weight_OI, 16)
    scales = {
        "w8a8": lambda: LayerScales(weight_scale(weight_OI * smooth_I, 127), torch.ones(()), 8, smooth_I),
        "w8a8-dynamic": lambda: DynamicScales(weight_scale(weight_OI, 127), 8),
        "w8a16": lambda: WeightScales(weight_scale(weight_OI, 127)),
        "w4a16": lambda: Int4Scales(group_scale(weight_OI, 16), 16),
        "w4a16, zero points": lambda: Int4Scales(ranges.scale, 16, ranges.zero_point),
        "fp8": lambda: Fp8Scales(weight_scale(weight_OI, 448), torch.ones(())),
    }[scheme]()
    dtype = grid_dtype(stored, scales)
    assert dtype in (stored, torch.float32)
    assert stored == torch.float16 or dtype == stored
    grid_OI = scales.on_grid(weight_OI)
    layer = nn.Linear(40, 5, False)
    layer.weight.data = grid_OI.to(dtype)
    assert scales.problem(layer.weight.detach()) is None
    torch.testing.assert_close(scales.on_grid(grid_OI.to(dtype).float()), grid_OI, rtol=1e-6, atol=0)


def test_half_precision_is_kept_where_its_range_suffices() -> None:
    scales = DynamicScales(torch.tensor([1e-3, 1e-4]), 8)
    assert grid_dtype(torch.float16, scales) == torch.float16
    assert grid_dtype(torch.float16, replace(scales, weight_scale=torch.tensor([1e-3, 1e-6]))) == torch.float32
    assert grid_dtype(torch.float16, replace(scales, weight_scale=torch.tensor([1e-3, 600.0]))) == torch.float32
    assert grid_dtype(torch.float64, scales) == torch.float32


def test_auto_streams_what_is_large(tmp_path: Path, blocks_context: Context, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write(tmp_path / "model", "llama")
    _, figures = quantized(folder, blocks_context, scheme="w4a16")
    assert "streamed" not in figures
    monkeypatch.setattr(streaming, "available_bytes", lambda: 2**17)
    _, figures = quantized(folder, blocks_context, scheme="w8a8")
    assert figures["streamed"]["hidden_bytes"] == 40 * tiny.LENGTH * 32 * 4
    assert figures["warnings"] == ["only 40 calibration rows; use at least 64 for reliable ranges"]
    _, figures = quantized(folder, blocks_context, scheme="w8a8", bias_correction=True)
    assert "streamed" not in figures
    assert any(
        "more than half of the available memory, and is not streamed: bias_correction needs the whole" in line for line in told.warnings
    )


def test_auto_streams_deep_models_that_are_rounded_by_outputs(
    tmp_path: Path, blocks_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write(tmp_path / "model", "llama")
    monkeypatch.setattr("quantize.streaming.DEEP", 2)
    for settings, streams in (({"rounding": "gptq"}, True), ({}, False), ({"rounding": "gptq", "sensitivity": True}, False)):
        _, figures = quantized(folder, blocks_context, scheme="w8a8-dynamic", **settings)
        assert ("streamed" in figures) == streams
    monkeypatch.setattr("quantize.streaming.DEEP", 99)
    assert "streamed" not in quantized(folder, blocks_context, scheme="w8a8-dynamic", rounding="gptq")[1]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_those_of_memory(kind: str, dtype: torch.dtype, tmp_path: Path, blocks_context: Context) -> None:
    folder = written(tmp_path, kind, dtype)
    (whole, expected), (streamed, found) = both(folder, blocks_context, scheme="w4a16", group_size=16, embeddings=True)
    tables = load_tables(whole)
    assert tables.keys() == load_tables(streamed).keys() == expected["tables"].keys() == found["tables"].keys()
    assert json.loads((streamed / "quantization.json").read_text()) == json.loads((whole / "quantization.json").read_text())
    assert found["float_layers"] == expected["float_layers"]
    assert found["tables"] == pytest.approx(expected["tables"])
    kept, stored = tensors(streamed), tensors(whole)
    for name, scale in tables.items():
        assert torch.equal(scale, load_tables(streamed)[name])
        assert torch.equal(kept[f"{name}.weight"], stored[f"{name}.weight"])
    assert torch.equal(logits(streamed), logits(whole))


def test_what_cannot_be_streamed_is_told_before_anything_runs(tmp_path: Path, blocks_context: Context, context: Context) -> None:
    config = Checkpoint(written(tmp_path, "llama"), "model.path").config
    Quantize(stream=True).check(config, None, blocks_context)
    for settings, reason in (
        ({"mode": "qat"}, "mode: qat needs the whole model"),
        ({"attention": True, "sensitivity": True}, "sensitivity, attention needs the whole model"),
        ({"calibration": {"method": "auto"}}, "calibration.method: auto needs the whole model"),
        ({"convolutions": True}, "convolutions: true needs the whole model"),
    ):
        with pytest.raises(InputError, match=f"stages.quantize.stream: true: {reason}"):
            Quantize(stream=True, **settings).check(config, None, blocks_context)
        Quantize(stream=False, **settings).check(config, None, blocks_context)
    with pytest.raises(InputError, match="text-classification is quantized in memory"):
        Quantize(stream=True).check(config, None, context)


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path, blocks_context: Context) -> None:
    folder = written(tmp_path, "llama")
    with pytest.raises(InputError, match=r"stages\.quantize\.exclude: '\*nothing' matches no layer"):
        quantized(folder, blocks_context, stream=True, scheme="w4a16", exclude=("*nothing",))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["nearest", "minmax", "smoothquant", "gptq"])
def test_memory_grows_by_a_layer_and_a_half_at_most(method: str, tmp_path: Path) -> None:
    """100 million parameters in bfloat16; RssAnon of a child process over its level after the imports."""
    from benchmarks.large_model import limit_of, measure, write_model

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2, "num_attention_heads": 32}
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, sizes, vocabulary=1000)
    found = measure(folder, method, rows=4, tokens=128, ceiling=2 * 2**30, threads=1)
    assert found["unit_bytes"] > 100e6
    assert found["peak"] - found["base"] <= limit_of(method, found, sizes["intermediate_size"])
