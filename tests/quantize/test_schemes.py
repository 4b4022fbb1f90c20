"""Every scheme through the stage: the checkpoint, the answers, the figures, and what does not go together."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.measure.closeness import distance
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.fp8 import Fp8Linear
from foundation.schemes.int4 import Int4Linear
from foundation.schemes.int8 import DynamicInt8Linear, Int8Linear
from foundation.schemes.int8_weights import Int8WeightLinear
from foundation.stage.context import Context
from quantize.quantize import Quantize
from quantize.rounding.adaround import adaround

pytestmark = pytest.mark.whole

FORMS = {"w8a8": Int8Linear, "w8a8-dynamic": DynamicInt8Linear, "w8a16": Int8WeightLinear, "w4a16": Int4Linear, "fp8": Fp8Linear}
ENCODER = 12


def run(bert: Artifact, context: Context, out: Path, **settings: Any) -> dict[str, Any]:
    out.mkdir()
    figures = Quantize.model_validate({"id": "quantize", **settings}).run(bert, context, out)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    return figures


def logits(folder: Path, context: Context) -> np.ndarray:
    return predict(
        load(folder), Checkpoint(folder).preprocessor(context.task, context.max_length, context.target), context.data.evaluation.rows, 16
    )


@pytest.mark.first(1)
@pytest.mark.parametrize("scheme", FORMS)
def test_a_quantized_model_answers_like_the_float_one(bert: Artifact, context: Context, tmp_path: Path, scheme: str) -> None:
    figures = run(bert, context, tmp_path / "out", scheme=scheme, group_size=16)
    before, after = logits(bert.path, context), logits(tmp_path / "out", context)
    limit = 0.4 if scheme == "w4a16" else 0.2
    assert 0 < np.abs(before - after).mean() < limit * before.std()
    model = load(tmp_path / "out")
    assert sum(isinstance(module, FORMS[scheme]) for module in model.modules()) == ENCODER == len(figures["layers"])
    assert Checkpoint(tmp_path / "out").scheme == scheme == figures["scheme"]
    assert Checkpoint(bert.path).scheme is None
    assert figures["weight_bits"] == {"w4a16": 4, "w8a16": 8, "fp8": 8}.get(scheme, figures["weight_bits"])
    assert (figures.get("group_size"), figures["calibrator"]) == {
        "w8a8": (None, "minmax"),
        "w8a8-dynamic": (None, None),
        "w8a16": (None, None),
        "w4a16": (16, None),
        "fp8": (None, "minmax"),
    }[scheme]
    for layer in figures["layers"]:
        assert 10 < layer["weight_sqnr_db"] < 60
        assert ("input_scale" in layer) == (scheme in ("w8a8", "fp8"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"({scheme})" in card


@pytest.mark.parametrize("scheme", FORMS)
def test_few_rows_are_a_warning_where_something_is_chosen_by_them(bert: Artifact, context: Context, tmp_path: Path, scheme: str) -> None:
    few = {"scheme": scheme, "group_size": 16, "calibration": {"rows": 8}}
    for settings, chosen in ((few, scheme != "w8a16"), ({**few, "rounding": "gptq"}, True)):
        if settings.get("rounding") and scheme == "fp8":
            continue
        warnings = run(bert, context, tmp_path / f"out-{len(settings)}", **settings)["warnings"]
        assert any("only 8 calibration rows" in line for line in warnings) == chosen, settings


@pytest.mark.parametrize("scheme", FORMS)
def test_the_weights_of_a_checkpoint_are_on_their_grids_in_any_type(bert: Artifact, context: Context, tmp_path: Path, scheme: str) -> None:
    run(bert, context, tmp_path / "out", scheme=scheme, group_size=32)
    full, half = load(tmp_path / "out"), load(tmp_path / "out", dtype=torch.bfloat16)
    for name in load_quantization(tmp_path / "out")[0]:
        assert torch.equal(full.get_submodule(name).weight.view(torch.uint8), half.get_submodule(name).weight.view(torch.uint8))


@pytest.mark.parametrize(
    ("scheme", "rounding"),
    [
        ("w8a8", "gptq"),
        pytest.param("w8a8", "adaround", marks=pytest.mark.slow),
        pytest.param("w8a8-dynamic", "gptq", marks=pytest.mark.slow),
        ("w8a8-dynamic", "adaround"),
        ("w4a16", "gptq"),
        pytest.param("w4a16", "adaround", marks=pytest.mark.slow),
    ],
)
def test_rounding_by_the_outputs_brings_their_error_down(
    bert: Artifact, context: Context, tmp_path: Path, scheme: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantize.rounding.rounding.adaround", partial(adaround, steps=50))
    settings = {"scheme": scheme, "rounding": rounding, "group_size": 16, "smoothquant": scheme == "w8a8"}
    if scheme == "w4a16":  # ranges by the outputs leave less to bring down
        settings["group_range"] = "weights"
    figures = run(bert, context, tmp_path / "out", **settings)
    told = figures["rounding"]
    assert (told["method"], len(told["layers"])) == (rounding, ENCODER)
    assert all(layer["error"] <= layer["error_nearest"] for layer in told["layers"])
    assert sum(layer["error"] for layer in told["layers"]) < 0.9 * sum(layer["error_nearest"] for layer in told["layers"])
    before, after = logits(bert.path, context), logits(tmp_path / "out", context)
    assert np.abs(before - after).mean() < 0.4 * before.std()


@pytest.mark.first(1)
@pytest.mark.parametrize(("scheme", "symmetric"), [("w8a8", True), ("w4a16", True), ("w4a16", False)])
def test_blocks_that_are_learned_err_less(bert: Artifact, context: Context, tmp_path: Path, scheme: str, symmetric: bool) -> None:
    settings = {"scheme": scheme, "rounding": "autoround", "autoround": {"steps": 40}, "group_size": 16, "symmetric": symmetric}
    figures = run(bert, context, tmp_path / "out", **settings)
    blocks = figures["rounding"]["layers"]
    assert [block["name"] for block in blocks] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert all(block["error"] <= block["error_nearest"] for block in blocks)
    assert sum(block["error"] for block in blocks) < 0.95 * sum(block["error_nearest"] for block in blocks)
    assert len(load_quantization(tmp_path / "out")[0]) == ENCODER == len(figures["layers"])
    before, after = logits(bert.path, context), logits(tmp_path / "out", context)
    assert np.abs(before - after).mean() < 0.4 * before.std()
    kept = {name: tensor.clone() for name, tensor in load(tmp_path / "out").state_dict().items()}
    run(bert, context, tmp_path / "again", **settings)
    assert all(torch.equal(kept[name], tensor) for name, tensor in load(tmp_path / "again").state_dict().items())


@pytest.mark.slow
def test_ranges_by_the_outputs_err_less_than_ranges_by_the_weights(bert: Artifact, context: Context, tmp_path: Path) -> None:
    """With gptq on top, whose figures start with rounding to nearest on the given ranges."""
    errors, grids = {}, {}
    for name in ("minmax", "weights", "outputs", "auto"):
        settings = {"scheme": "w4a16", "group_size": 16, "symmetric": False, "group_range": name}
        figures = run(bert, context, tmp_path / name, rounding="gptq", **settings)
        errors[name] = sum(layer["error_nearest"] for layer in figures["rounding"]["layers"])
        run(bert, context, tmp_path / f"{name}-nearest", **settings)
        grids[name] = load_quantization(tmp_path / f"{name}-nearest")[0]
    assert errors["outputs"] < 0.95 * errors["weights"]
    assert errors["outputs"] < 0.95 * errors["minmax"]
    assert errors["auto"] == errors["outputs"]
    for name, scales in grids["auto"].items():
        assert torch.equal(scales.tensors()["weight_scale"], grids["outputs"][name].tensors()["weight_scale"])
    assert any(
        not torch.equal(scales.tensors()["weight_scale"], grids["weights"][name].tensors()["weight_scale"])
        for name, scales in grids["auto"].items()
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(pytest.param(alone, marks=pytest.mark.slow) for alone in ({"rounding": "gptq"}, {"rounding": "adaround"}, {"awq": True})),
        {"awq": True, "rounding": "gptq"},
    ],
)
def test_zero_points_err_less_than_symmetric_weights(
    bert: Artifact, context: Context, tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantize.rounding.rounding.adaround", partial(adaround, steps=50))
    before = logits(bert.path, context)
    noise, errors = {}, {}
    for symmetric in (True, False):
        out = tmp_path / str(symmetric)
        figures = run(bert, context, out, scheme="w4a16", group_size=32, symmetric=symmetric, **settings)
        assert figures.get("symmetric") == (None if symmetric else False)
        found = load_quantization(out)[0]
        assert {"weight_zero_point" in scales.tensors() for scales in found.values()} == {not symmetric}
        noise[symmetric] = np.mean([layer["weight_sqnr_db"] for layer in figures["layers"]])
        rounded = figures.get("rounding", {"layers": []})["layers"]
        assert all(layer["error"] <= layer["error_nearest"] for layer in rounded)
        errors[symmetric] = sum(layer["error"] for layer in rounded)
        assert 0 < np.abs(before - logits(out, context)).mean() < 0.4 * before.std()
        whole, half = load(out), load(out, dtype=torch.bfloat16)
        assert all(torch.equal(whole.get_submodule(name).codes(), half.get_submodule(name).codes()) for name in found)
    if "rounding" in settings:
        assert errors[False] < 0.9 * errors[True]
    else:
        assert noise[False] > noise[True] + 0.5


def test_awq_gptq_and_bias_correction_together_are_closer_than_rounding_to_nearest(
    bert: Artifact, context: Context, tmp_path: Path, told: Any
) -> None:
    plain = run(bert, context, tmp_path / "plain", scheme="w4a16", group_size=32)
    settings = {"rounding": "gptq", "awq": True, "bias_correction": True}
    figures = run(bert, context, tmp_path / "out", scheme="w4a16", group_size=32, **settings)
    assert {"awq", "rounding", "bias_correction"} <= figures.keys()
    assert "awq" not in plain
    assert sorted(name for group in figures["awq"] for name in group["layers"]) == sorted(layer["name"] for layer in figures["layers"])
    reference = logits(bert.path, context)
    far, near = (distance(context.task, reference, logits(tmp_path / name, context)) for name in ("plain", "out"))
    assert near < far
    assert any(line.startswith("  awq: ") for line in told.lines)


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_scans_and_mixed_precision_know_every_scheme(bert: Artifact, context: Context, tmp_path: Path, scheme: str) -> None:
    settings = {"rounding": "nearest" if scheme == "fp8" else "gptq", "exclude": ["*.layer.1.*"]}
    figures = run(bert, context, tmp_path / "out", scheme=scheme, mixed_precision={"max_drop": 0, "max_float": 0.5}, **settings)
    scan = {layer["name"]: layer for layer in figures["sensitivity"]["layers"]}
    assert len(scan) == 6
    assert all((layer["inputs"] == 0) == (scheme == "w4a16") for layer in scan.values())
    floating = figures["mixed_precision"]["floating"]
    model, original = load(tmp_path / "out"), load(bert.path)
    for name in floating:
        assert torch.equal(model.get_submodule(name).weight, original.get_submodule(name).weight)


def test_an_auto_calibrator_of_fp8_tries_what_has_no_equal_steps(bert: Artifact, context: Context, tmp_path: Path) -> None:
    figures = run(bert, context, tmp_path / "out", scheme="fp8", calibration={"method": "auto", "rows": 64})
    assert list(figures["calibrators"]["distances"]) == ["minmax", "moving_average", "percentile"]
    assert figures["calibrator"] in figures["calibrators"]["distances"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "w4a16", "mode": "qat"}, "mode: qat trains in w8a8 alone"),
        ({"scheme": "fp8", "mode": "auto"}, "mode: auto trains in w8a8 alone"),
        ({"rounding": "gptq", "mode": "qat"}, "rounding: gptq is for mode ptq"),
        ({"scheme": "fp8", "rounding": "adaround"}, "rounding: adaround is for integer weights"),
        ({"awq": True}, "awq: for scheme w4a16.*w4a8-block alone"),
        ({"symmetric": False}, "symmetric: false .*w4a16.*w8a8"),
        ({"scheme": "fp8", "symmetric": False}, "symmetric: false .*w4a16.*fp8"),
        ({"scheme": "w4a16", "symmetric": "no zero points"}, "symmetric"),
        ({"scheme": "w4a16", "weight_bits": 8}, "weight_bits: .*w4a16 have 4"),
        ({"scheme": "fp8", "calibration": {"method": "mse"}}, "calibration.method: mse counts the equal steps of int8; fp8 takes minmax"),
        ({"scheme": "w4a16", "attention": True}, "attention, residual: int8 products"),
        ({"scheme": "w4a16", "group_size": 100}, "group_size"),
        ({"group_range": "outputs"}, "group_range: for scheme w4a16.*w4a8-block alone; weights of w8a8 have no groups"),
        ({"scheme": "w4a16", "awq": True, "group_range": "weights"}, "group_range: weights given, but awq chooses ranges by the outputs"),
        ({"group_scales": "two_level"}, "group_scales: for scheme w4a16.*w4a8-block alone; weights of w8a8 have no groups"),
        ({"scheme": "w4a16", "group_scales": "k_quant"}, "group_scales: k_quant gives each group an offset; give symmetric: false"),
        ({"rounding": "gptq", "autoround": {"steps": 9}}, "autoround: given, but rounding: gptq does not read it"),
        ({"rounding": "autoround", "autoround": {"steps": 0}}, "autoround.steps"),
        ({"rotation": "hadamard", "learned_rotation": {"steps": 9}}, "learned_rotation: given, but rotation: hadamard does not read it"),
        ({"rotation": "learned", "learned_rotation": {"learning_rate": 0}}, "learned_rotation.learning_rate"),
        ({"rotation": "learned", "learned_rotation": {"batch_size": 0}}, "learned_rotation.batch_size"),
        ({"scheme": "fp8", "rounding": "autoround"}, "rounding: autoround is for integer weights"),
        ({"scheme": "w2a2"}, "scheme"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as refused:
        Quantize.model_validate(settings)
    assert len(refused.value.errors()) == 1


def test_auto_mode_takes_a_rounding_along(context: Context) -> None:
    from quantize.escalation import ladder

    steps = ladder(Quantize(mode="auto", rounding="gptq"), 0.01)
    assert {name: step.rounding for name, step in steps.items()} == {
        "ptq": "gptq",
        "smoothing and bias correction": "gptq",
        "mixed precision": "gptq",
        "qat": "nearest",
        "qat with distillation": "nearest",
    }


@pytest.mark.parametrize(
    ("scheme", "engines", "doubted"),
    [
        ("w4a16", ("openvino_genai", "onnxruntime_decoder"), True),
        ("w4a8-block", ("onnxruntime_decoder",), False),
        ("w8a16", ("onnxruntime_decoder",), False),
        ("w4a16", ("openvino_genai",), False),
    ],
)
def test_a_plan_notes_where_int4_by_floats_is_slow(scheme: str, engines: tuple[Any, ...], doubted: bool, context: Context) -> None:
    doubts = list(Quantize(scheme=scheme).doubts(replace(context, target=Target(engines=engines, sequence_lengths=(8,)))))
    assert [line for line in doubts if "onnxruntime_decoder" in line and "w4a8-block" in line] == doubts
    assert bool(doubts) is doubted


@pytest.mark.parametrize(
    ("kind", "engines", "without"),
    [
        ("k_quant", ("openvino_genai", "onnxruntime_decoder"), "onnxruntime_decoder"),
        ("k_quant", ("openvino_genai",), None),
        ("two_level", ("openvino_genai", "onnxruntime_decoder"), None),
    ],
)
def test_a_plan_notes_which_engines_have_no_offsets(kind: Any, engines: tuple[Any, ...], without: str | None, context: Context) -> None:
    stage = Quantize(scheme="w4a8-block", symmetric=False, group_scales=kind)
    doubts = list(stage.doubts(replace(context, target=Target(engines=engines, sequence_lengths=(8,)))))
    assert [f"group_scales: {without}" in line for line in doubts] == [True] * (without is not None)
