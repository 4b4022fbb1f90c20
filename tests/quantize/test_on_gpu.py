"""Quantization beside a GPU: the model computes there, and what is written is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.run.implicit import PREDICTIONS, Evaluate
from foundation.artifacts.artifact import Artifact
from foundation.data.splits import Data
from foundation.stage.context import Context
from quantize.folding import find_folds
from quantize.quantize import Quantize
from tests.architectures.steps import Bench
from tests.architectures.table import ARCHITECTURES
from tests.pretend_cuda import gpu
from tests.quantize.conftest import sentences, write_bert
from tests.tiny_towers import stock

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("shallow"), 1)


@pytest.fixture
def bert(shallow: Path) -> Artifact:
    """Of one layer, for the same reason as there are few rows."""
    return Artifact(shallow, {})


@pytest.fixture
def context(context: Context) -> Context:
    """Of few rows: what stands for a GPU takes a Python function for each call of torch."""
    return replace(context, data=Data(sentences(32, 0), sentences(12, 1), sentences(12, 2), context.data.labels))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each model was that was loaded."""
    from foundation.models import checkpoint

    loaded, weights = checkpoint.load, []

    def load(*args: Any, **kwargs: Any) -> Any:
        model = loaded(*args, **kwargs)
        weights.append(next(model.parameters()).device.type)
        return model

    for place in ("foundation.models.checkpoint.load", "quantize.steps.load", "quantize.escalation.load"):
        monkeypatch.setattr(place, load)
    return weights


def test_a_checkpoint_is_evaluated_on_the_gpu(
    bert: Artifact, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    folders = [tmp_path / "cpu", tmp_path / "gpu"]
    for folder in folders:
        folder.mkdir()
    bert = Artifact(bert.path, {"id": "baseline"})
    Evaluate(id="evaluate-x").run(bert, context, folders[0])
    with gpu(monkeypatch):
        Evaluate(id="evaluate-x").run(bert, context, folders[1])
    assert seen == ["cpu", "cuda"]
    expected, found = (load_file(folder / PREDICTIONS)["logits"].numpy() for folder in folders)
    np.testing.assert_array_equal(found, expected)


USUAL: list[dict[str, Any]] = [
    {"scheme": "w8a8", "smoothquant": True, "attention": True, "bias_correction": True, "sensitivity": True},
    {"scheme": "w8a8", "rounding": "gptq"},
]
SELDOM: list[dict[str, Any]] = [
    {"scheme": "w8a8"},
    {"scheme": "w8a8", "calibration": {"method": "auto"}},
    {"scheme": "w8a8", "rounding": "adaround"},
    {"scheme": "w4a16", "group_size": 16, "rounding": "autoround", "autoround": {"steps": 10}},
    {"scheme": "w8a8", "mixed_precision": {"max_drop": 0.0}},
    {"scheme": "w8a8-dynamic"},
    {"scheme": "w4a16", "group_size": 16, "awq": True},
    {"scheme": "fp8"},
]


@pytest.mark.parametrize("settings", [*USUAL, *(pytest.param(settings, marks=pytest.mark.slow) for settings in SELDOM)], ids=str)
def test_a_checkpoint_is_quantized_on_the_gpu(
    settings: dict[str, Any], bert: Artifact, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    folders = [tmp_path / "cpu", tmp_path / "gpu"]
    for folder in folders:
        folder.mkdir()
    Quantize(id="quantize", **settings).run(bert, context, folders[0])
    with gpu(monkeypatch):
        Quantize(id="quantize", **settings).run(bert, context, folders[1])
    assert seen[-1] == "cuda"
    for name in ("model.safetensors", "quantization.safetensors"):
        expected, found = (load_file(folder / name) for folder in folders)
        assert expected.keys() == found.keys()
        for key in expected:
            np.testing.assert_array_equal(found[key].float().numpy(), expected[key].float().numpy(), err_msg=key)
    quantized, answers = Artifact(folders[0], {"id": "quantize"}), [tmp_path / "answers-cpu", tmp_path / "answers-gpu"]
    for folder in answers:
        folder.mkdir()
    Evaluate(id="evaluate-x").run(quantized, context, answers[0])
    with gpu(monkeypatch):
        Evaluate(id="evaluate-x").run(quantized, context, answers[1])
    expected, found = (load_file(folder / PREDICTIONS)["logits"] for folder in answers)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.slow), "convnext"])
def test_convolutions_are_quantized_on_the_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> None:
    bench = Bench.of(ARCHITECTURES[name], tmp_path)
    folders = [tmp_path / "on-cpu", tmp_path / "on-gpu"]
    stage = Quantize(id="quantize", bias_correction=True)
    for folder in folders:
        (folder / "answers").mkdir(parents=True)
    stage.run(bench.float_model, bench.context, folders[0])
    with gpu(monkeypatch):
        stage.run(bench.float_model, bench.context, folders[1])
        Evaluate(id="evaluate-x").run(Artifact(folders[1], {"id": "quantize"}), bench.context, folders[1] / "answers")
    assert seen == ["cpu", "cuda", "cuda"]
    Evaluate(id="evaluate-x").run(Artifact(folders[0], {"id": "quantize"}), bench.context, folders[0] / "answers")
    for name in ("model.safetensors", "quantization.safetensors", "answers/" + PREDICTIONS):
        expected, found = (load_file(folder / name) for folder in folders)
        for key in expected:
            np.testing.assert_allclose(found[key].float().numpy(), expected[key].float().numpy(), atol=1e-5, err_msg=key)


def test_folds_of_a_model_that_picks_the_last_token_are_found_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its indices are on the GPU, and so must be the channel numbers that they pick from."""
    model = stock("clip")
    features = {"input_ids": torch.randint(1, 90, (2, 7)), "pixel_values": torch.randn(2, 3, 8, 8)}
    expected = find_folds(model, features, vectors_of)
    with gpu(monkeypatch):
        found = find_folds(model.to("cuda"), features, vectors_of)
    assert found == expected
    assert any(fold.blocked is None for fold in found)


def vectors_of(model: Any, features: Mapping[str, Tensor]) -> Tensor:
    """Returns the vectors of texts and of images."""
    device = next(model.parameters()).device
    texts = model.get_text_features(input_ids=features["input_ids"].to(device)).pooler_output
    return texts + model.get_image_features(pixel_values=features["pixel_values"].to(device)).pooler_output


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [*USUAL, *SELDOM], ids=str)
def test_a_true_gpu_quantizes_as_the_cpu_does(
    settings: dict[str, Any], bert: Artifact, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "cpu", tmp_path / "gpu"]
    for folder, available in zip(folders, (False, True), strict=True):
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr("torch.cuda.is_available", lambda available=available: available)
            Quantize(id="quantize", **settings).run(bert, context, folder)
            (folder / "answers").mkdir()
            Evaluate(id="evaluate-x").run(Artifact(folder, {"id": "quantize"}), context, folder / "answers")
    expected, found = (load_file(folder / "answers" / PREDICTIONS)["logits"].numpy() for folder in folders)
    assert np.median(np.abs(found - expected)) < 0.02  # sums in another order move codes on rounding boundaries
