"""Post-training quantization of a tiny model, end to end, and the choice of layers in several families."""

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

from compress.artifact import Artifact
from compress.data import preprocessor
from compress.errors import InputError
from compress.evaluate import predict
from compress.int8 import Int8Linear, levels, load_quantization, on_grid, weight_bits, weight_scale
from compress.model import linears, load, save
from compress.splits import Data, Split
from compress.stage import Context, Target
from quantize.ptq import HEAD, Quantize, choose_layers, mse_weight_scale

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 30}
WORDS = ["bad", "dull", "film", "fine", "good", "great", "hate", "like", "love", "movie", "not", "poor", "the", "very", "was"]
ENCODER = 12  # six linear layers in each of two blocks


def logits(folder: Path, context: Context) -> np.ndarray:
    processor = preprocessor(folder, context.task, context.max_length, context.target)
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
    assert (figures["scheme"], figures["weight_bits"], figures["calibrator"], figures["rows"]) == ("w8a8", bits, "percentile", 200)
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
        weight = stock.get_submodule(name).weight.detach()
        codes = torch.round(weight / scales.weight_scale[:, None])
        assert torch.equal(codes * scales.weight_scale[:, None], weight)
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
    assert len(refused.value.problems) == 2
    assert "stages.quantize.exclude" in refused.value.problems[0]
    assert "did you mean 'bert.pooler.dense'" in refused.value.problems[0]
    assert "'*.layer.9.*' matches no layer" in refused.value.problems[1]
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
    dull = Split(["dull film"] * 100 + ["very dull film"] * 100, np.zeros(200, np.int64))
    narrow = replace(context, data=Data(dull, context.data.selection, context.data.evaluation, context.data.labels))
    figures = figures_of(Artifact(tmp_path, {}), narrow, tmp_path / "out")
    beyond = [layer["name"] for layer in figures["layers"] if layer["selection_max_abs"] > 1.5 * layer["max_abs"]]
    assert beyond
    assert "2 calibration rows" in figures["warnings"][0]
    assert f"{len(beyond)} layers reach more than 1.5 times as far, first {beyond[0]}" in figures["warnings"][1]


def test_a_layer_that_no_row_reaches_stays_float(bert: Artifact, context: Context, told, tmp_path: Path, monkeypatch) -> None:
    def with_idle_layer(folder: Path) -> nn.Module:
        model = load(folder)
        model.bert.encoder.layer[0].idle = nn.Linear(3, 3)
        return model

    monkeypatch.setattr("compress.model.load", with_idle_layer)
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
    "settings",
    [{"mode": "magic"}, {"weight_bits": 4}, {"calibration": {"method": "entropy"}}, {"calibration": {"rows": 0}}, {"bits": 8}],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Quantize(id="quantize", **settings)


FAMILIES = {
    "roberta": (lambda: transformers.RobertaConfig(**TEXT), 12, ["classifier.dense", "classifier.out_proj"]),
    "distilbert": (
        lambda: transformers.DistilBertConfig(vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
        12,
        ["pre_classifier", "classifier"],
    ),
    "electra": (
        lambda: transformers.ElectraConfig(**TEXT, embedding_size=8),
        12,
        ["electra.embeddings_project", "classifier.dense", "classifier.out_proj"],
    ),
    "albert": (
        lambda: transformers.AlbertConfig(**TEXT, embedding_size=8),
        6,
        ["albert.encoder.embedding_hidden_mapping_in", "albert.pooler", "classifier"],
    ),
    "deberta": (lambda: transformers.DebertaV2Config(**TEXT), 12, ["pooler.dense", "classifier"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_the_blocks_are_chosen_in_every_family(family: str) -> None:
    config, num_chosen, heads = FAMILIES[family]
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(config())
    chosen, kept = choose_layers(model, linears(model), (), "stages.quantize.exclude")
    assert len(chosen) == num_chosen
    assert kept == dict.fromkeys(heads, HEAD)


def test_layers_of_a_vision_model_are_chosen() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForImageClassification.from_config(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4))
    chosen, kept = choose_layers(model, linears(model), (), "stages.quantize.exclude")
    assert len(chosen) == 12
    assert kept == {"classifier": HEAD}


@pytest.mark.parametrize("bits", [8, 7])
def test_weight_scales_are_as_good_as_any_of_a_search(bits: int) -> None:
    weight, largest = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)), levels(bits)
    weight[0] = 0
    weight[1, 0] = 20
    scale = mse_weight_scale(weight, largest)

    def error(scale_O: torch.Tensor) -> torch.Tensor:
        return (on_grid(weight, scale_O, largest) - weight).square().sum(1)

    full = weight_scale(weight, largest)
    tried = torch.stack([error(full * clip) for clip in np.linspace(0.8, 1, 21)])
    assert torch.allclose(error(scale), tried.min(dim=0).values, rtol=1e-3)
    assert (error(scale) <= error(full)).all()
    assert scale[0] == 1
