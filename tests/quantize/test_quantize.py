"""The stage on a tiny model, end to end: what it writes, what it tells, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from torch import nn

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.measure.closeness import distance
from foundation.measure.predictions import finely, predict
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.size import Passes
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.int8 import Int8Linear, weight_bits
from foundation.stage.context import Context
from quantize.choices import METHODS
from quantize.ptq import HEAD
from quantize.quantize import Quantize
from quantize.settings import SmoothQuant

pytestmark = pytest.mark.whole

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 30}
WORDS = ["bad", "dull", "film", "fine", "good", "great", "hate", "like", "love", "movie", "not", "poor", "the", "very", "was"]
ENCODER = 12  # six linear layers in each of two blocks


@pytest.fixture(autouse=True)
def _few_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the thousand that the method `mse` tries for each layer; test_calibration holds it against a search written out."""
    monkeypatch.setattr("quantize.calibration.MSE_CANDIDATES", 40)


def logits(folder: Path, context: Context) -> np.ndarray:
    processor = Checkpoint(folder).preprocessor(context.task, context.max_length, context.target)
    return predict(load(folder), processor, context.data.evaluation.rows, 16)


def figures_of(bert: Artifact, context: Context, out: Path, **settings: Any) -> dict[str, Any]:
    out.mkdir()
    return Quantize(id="quantize", **settings).run(bert, context, out)


@pytest.mark.parametrize("bits", [8, 7])
def test_a_quantized_model_answers_like_the_float_one(bert: Artifact, context: Context, tmp_path: Path, bits: int) -> None:
    figures = figures_of(bert, context, tmp_path / "out", weight_bits=bits)
    before, after = logits(bert.path, context), logits(tmp_path / "out", context)
    assert np.mean(before.argmax(1) == after.argmax(1)) >= 0.95
    assert 0 < np.abs(before - after).mean() < 0.1 * before.std()
    assert (figures["scheme"], figures["weight_bits"], figures["calibrator"], figures["rows"]) == ("w8a8", bits, "minmax", 200)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_encoder_layers_are_int8_and_the_head_is_float(bert: Artifact, context: Context, tmp_path: Path) -> None:
    figures = figures_of(bert, context, tmp_path / "out")
    model = load(tmp_path / "out")
    int8_names = [name for name, module in model.named_modules() if isinstance(module, Int8Linear)]
    assert len(int8_names) == ENCODER == len(figures["layers"])
    assert all(".encoder.layer." in name for name in int8_names)
    assert figures["float_layers"] == {"bert.pooler.dense": HEAD, "classifier": HEAD} == load_quantization(tmp_path / "out")[1]
    assert [figure["name"] for figure in figures["layers"]] == int8_names


def test_the_folder_is_a_stock_checkpoint_too(bert: Artifact, context: Context, tmp_path: Path) -> None:
    figures_of(bert, context, tmp_path / "out", weight_bits=8)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    layers, _ = load_quantization(tmp_path / "out")
    for name, scales in layers.items():
        weight, smooth = stock.get_submodule(name).weight.detach(), scales.input_smooth
        codes = torch.round(weight * (1 if smooth is None else smooth) / scales.weight_scale[:, None])
        assert torch.equal(codes * scales.weight_scale[:, None] / (1 if smooth is None else smooth), weight)
        assert codes.abs().max() <= 127
    original = load(bert.path)
    assert torch.equal(stock.classifier.weight, original.classifier.weight)
    assert torch.equal(stock.get_input_embeddings().weight, original.get_input_embeddings().weight)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("good film")["input_ids"]
    assert {file.name for file in bert.path.iterdir()} <= {file.name for file in (tmp_path / "out").iterdir()}
    assert not list((tmp_path / "out").glob("*.bin"))


def test_layers_of_one_tensor_share_a_scale(bert: Artifact, context: Context, tmp_path: Path) -> None:
    figures = figures_of(bert, context, tmp_path / "out")
    scales = {figure["name"].removeprefix("bert.encoder."): figure["input_scale"] for figure in figures["layers"]}
    for block in range(2):
        attention = [scales[f"layer.{block}.attention.self.{name}"] for name in ("query", "key", "value")]
        assert len(set(attention)) == 1
    assert len(set(scales.values())) == 8


def test_figures_of_a_layer_are_in_their_ranges(bert: Artifact, context: Context, tmp_path: Path) -> None:
    by_method = {
        method: figures_of(bert, context, tmp_path / method, calibration={"method": method, "percentile": 99.0})["layers"]
        for method in ("minmax", "percentile", "mse")
    }
    for minmax, percentile, mse in zip(by_method["minmax"], by_method["percentile"], by_method["mse"], strict=True):
        assert minmax["input_scale"] == pytest.approx(minmax["max_abs"] / 127, rel=1e-6)
        assert minmax["clipped"] == 0
        assert 0.001 < percentile["clipped"] <= 0.01
        assert percentile["input_scale"] < mse["input_scale"] <= minmax["input_scale"]
        assert mse["input_sqnr_db"] >= max(minmax["input_sqnr_db"], percentile["input_sqnr_db"]) - 0.05
        assert 30 < mse["weight_sqnr_db"] < 60
        assert mse["selection_max_abs"] > 0


def test_padding_does_not_reach_the_scales(bert: Artifact, context: Context, tmp_path: Path) -> None:
    padded = replace(context, target=Target(sequence_lengths=(24,)))
    first, second = figures_of(bert, context, tmp_path / "a"), figures_of(bert, padded, tmp_path / "b")
    for a, b in zip(first["layers"], second["layers"], strict=True):
        assert a["input_scale"] == pytest.approx(b["input_scale"], rel=0.01)
        assert a["max_abs"] == pytest.approx(b["max_abs"], rel=1e-4)


def test_the_same_run_gives_the_same_bytes(bert: Artifact, context: Context, tmp_path: Path) -> None:
    assert figures_of(bert, context, tmp_path / "a") == figures_of(bert, context, tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_the_parent_is_never_written_to(bert: Artifact, context: Context, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in bert.path.iterdir()}
    figures_of(bert, context, tmp_path / "out")
    assert {file.name: file.read_bytes() for file in bert.path.iterdir()} == before


def test_excluded_layers_stay_exactly_as_they_were(bert: Artifact, context: Context, tmp_path: Path) -> None:
    figures = figures_of(bert, context, tmp_path / "out", exclude=("*.layer.1.*", "*.query"))
    assert len(figures["layers"]) == 5
    kept = figures["float_layers"]
    assert kept["bert.encoder.layer.1.output.dense"] == "excluded by '*.layer.1.*'"
    assert "excluded" in kept["bert.encoder.layer.0.attention.self.query"]
    original, model = load(bert.path), load(tmp_path / "out")
    for name in kept:
        assert torch.equal(model.get_submodule(name).weight, original.get_submodule(name).weight)


def test_patterns_that_match_nothing_are_all_named(bert: Artifact, context: Context, tmp_path: Path) -> None:
    exclude = ("bert.pooler.dens", "*.layer.9.*", "classifier")
    with pytest.raises(InputError) as refused:
        figures_of(bert, context, tmp_path / "out", exclude=exclude)
    assert len(refused.value.lines) == 2
    assert "stages.quantize.exclude" in refused.value.lines[0]
    assert "did you mean 'bert.pooler.dense'" in refused.value.lines[0]
    assert "'*.layer.9.*' matches no layer" in refused.value.lines[1]
    assert not list((tmp_path / "out").iterdir())


def test_excluding_everything_is_an_error(bert: Artifact, context: Context, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no layer is left to quantize"):
        figures_of(bert, context, tmp_path / "out", exclude=("*",))


def test_few_rows_are_a_warning(bert: Artifact, context: Context, told, tmp_path: Path) -> None:
    figures = figures_of(bert, context, tmp_path / "out", calibration={"rows": 10})
    assert figures["rows"] == 10
    assert "10 calibration rows" in figures["warnings"][0]
    assert told.warnings == [f"quantize: {warning}" for warning in figures["warnings"]]


def test_rows_beyond_the_calibrated_range_are_a_warning(bert: Artifact, context: Context, tmp_path: Path) -> None:
    assert figures_of(bert, context, tmp_path / "in range")["warnings"] == []
    # One word with an embedding of one large element: the layer norm turns it into sqrt(32) times the usual size.
    model = load(bert.path)
    embeddings = model.get_input_embeddings().weight.detach()
    embeddings[5 + WORDS.index("great")] = 1000 * torch.eye(embeddings.shape[1])[0]
    save(model, bert.path, tmp_path, "with an outlier")
    dull = Split(["dull film"] * 100 + ["very dull film"] * 100, ClassIds(np.zeros(200, np.int64)))
    narrow = replace(context, data=Data(dull, context.data.selection, context.data.evaluation, context.data.labels))
    figures = figures_of(Artifact(tmp_path, {}), narrow, tmp_path / "out")
    reach = [layer["name"] for layer in figures["layers"] if layer["selection_max_abs"] > 1.5 * layer["max_abs"]]
    beyond = [layer["name"] for layer in figures["layers"] if layer["name"] in reach and layer["selection_clipped"] > 0.001]
    assert beyond
    assert "2 calibration rows" in figures["warnings"][0]
    assert f"the inputs of {len(beyond)} layers are more than 1.5 times as large" in figures["warnings"][1]
    assert f"first {beyond[0]}" in figures["warnings"][1]


def test_a_layer_that_no_row_reaches_stays_float(bert: Artifact, context: Context, told, tmp_path: Path, monkeypatch) -> None:
    def with_idle_layer(folder: Path, device: torch.device) -> nn.Module:
        model = load(folder, device)
        model.bert.encoder.layer[0].idle = nn.Linear(3, 3)
        return model

    monkeypatch.setattr("quantize.steps.load", with_idle_layer)
    figures = figures_of(bert, context, tmp_path / "out")
    assert figures["float_layers"]["bert.encoder.layer.0.idle"] == "not reached by the calibration rows"
    assert "idle" in told.warnings[0]
    assert len(figures["layers"]) == ENCODER


def test_auto_bits_follow_the_target(context: Context) -> None:
    stage = Quantize(id="quantize")
    assert stage.bits(context) == weight_bits("cpu")
    assert stage.bits(replace(context, target=Target(device="cuda"))) == 8
    assert Quantize(id="quantize", weight_bits=7).bits(replace(context, target=Target(device="cuda"))) == 7
    assert stage.depends(context) == {"weight_bits": weight_bits("cpu")}


@pytest.mark.parametrize(
    ("scheme", "engines", "bits"),
    [
        ("w8a8-dynamic", ("openvino_genai",), 8),  # multiplies floats by the weights: no sum of integers
        ("w8a8-dynamic", ("openvino_genai", "onnxruntime"), 7),
        ("w8a8", ("openvino_genai",), 7),
    ],
)
def test_a_bit_is_spared_only_where_integers_are_summed(
    scheme: Any, engines: tuple[Any, ...], bits: int, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foundation.schemes.int8.weight_bits", lambda device: 7)  # a CPU without VNNI
    assert Quantize(scheme=scheme).bits(replace(context, target=Target(engines=engines))) == bits


@pytest.mark.parametrize(
    "settings",
    [{"mode": "magic"}, {"weight_bits": 4}, {"calibration": {"method": "guess"}}, {"calibration": {"rows": 0}}, {"bits": 8}],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Quantize(id="quantize", **settings)


def test_auto_keeps_the_default_unless_another_calibrator_is_closer_beyond_chance(
    bert: Artifact, context: Context, told, tmp_path: Path
) -> None:
    figures = figures_of(bert, context, tmp_path / "out", calibration={"method": "auto"})
    tried = figures["calibrators"]
    assert list(tried["distances"]) == list(METHODS)
    assert (tried["measure"], tried["rows"]) == ("kl", 40)
    nearer = [method for method, limits in tried["more_than_default"].items() if limits[1] < 0]
    assert tried["default"] == "minmax"
    assert figures["calibrator"] == min(nearer, key=tried["distances"].__getitem__, default="minmax")
    assert all(low <= tried["distances"][method] <= high for method, (low, high) in tried["intervals"].items())
    for method, measured in tried["distances"].items():
        again = figures_of(bert, context, tmp_path / method, calibration={"method": method})
        assert "calibrators" not in again
        assert measured == pytest.approx(selection_distance(bert, tmp_path / method, context), rel=1e-6)
        if method == figures["calibrator"]:
            assert again["layers"] == figures["layers"]
    assert any(line.startswith(f"  calibrator: {figures['calibrator']}, with kl") for line in told.lines)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def selection_distance(bert: Artifact, quantized: Path, context: Context) -> float:
    processor = finely(Checkpoint(bert.path).preprocessor(context.task, context.max_length, context.target))
    before, after = (predict(load(folder), processor, context.data.selection.rows, 32) for folder in (bert.path, quantized))
    return distance(context.task, before, after)


def test_everything_at_once_is_told_in_json(vit: Artifact, image_context: Context, tmp_path: Path) -> None:
    settings = {"smoothquant": {"alpha": "auto", "prescale": True}, "equalization": True, "bias_correction": True}
    figures = figures_of(vit, image_context, tmp_path / "out", calibration={"method": "auto", "rows": 64}, **settings)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert {"calibrators", "smoothquant", "equalization", "bias_correction"} <= figures.keys()
    groups = [layer for group in figures["smoothquant"] for layer in group["layers"]]
    assert sorted(groups) == sorted(layer["name"] for layer in figures["layers"])


def test_work_grows_with_the_passes(context: Context) -> None:
    plain, more = Quantize(smoothquant=False), Quantize(smoothquant=True, calibration={"method": "auto"}, bias_correction=True)
    assert plain.work(Passes(10, 10, 2), context.data) >= 10 * (200 + 40)
    assert more.work(Passes(10, 10, 2), context.data) > plain.work(Passes(10, 10, 2), context.data)


def test_smoothing_is_a_flag_or_a_map() -> None:
    assert Quantize(smoothquant=False).smoothing is None
    assert Quantize(smoothquant=True).smoothing == SmoothQuant()
    assert Quantize.model_validate({"smoothquant": {"alpha": 0.5}}).smoothing == SmoothQuant(alpha=0.5)
    assert Quantize.model_validate(Quantize(smoothquant=SmoothQuant(alpha=0.5)).model_dump(mode="json")).smoothing == SmoothQuant(alpha=0.5)
