"""Both towers of a model as graphs: what they hold, what they compute, and that each has to agree with torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from compress.reading.load import load_data
from export.builds import Build
from export.choices import Generation
from export.engines.spec import EngineSpec
from export.engines.towers import Towers
from export.export import Export
from export.exporter import MODEL
from export.generation.agreement import Agreement
from export.graph.onnx import export_float
from export.towers import TowersExporter, checkpoint_of_tower
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.exported import Engine
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.config import DataConfig
from foundation.data.splits import Data
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.sites import load_sites
from foundation.stage.context import Context
from quantize.quantize import Quantize
from tests import tiny_towers
from tests.tiny_towers import LENGTH, TASK

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

TARGET = Target(engines=("onnxruntime",), batch_sizes=(1, 2), sequence_lengths=(16,), threads=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tiny_towers.folder(tmp_path_factory.mktemp("images"))
    return load_data(DataConfig(path=str(folder), prompts=("a photo of a {}", "something {}")), TASK, None, lambda line: None)


def context_of(data: Data, folder: Path, where: Path, quantized: Path | None = None) -> Context:
    checkpoints = {"model": Artifact(folder, {"id": "model", "parents": [], "digest": "x"})}
    if quantized is not None:
        checkpoints["quantize"] = Artifact(quantized, {"id": "quantize", "parents": ["x"], "digest": "y"})
    return Context(TASK, data, LENGTH, TARGET, 0, ConsoleProgress("silent"), where, checkpoints)


@pytest.fixture(scope="module", params=["clip", pytest.param("siglip", marks=pytest.mark.slow)])
def quantized(request: pytest.FixtureRequest, data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an int8 checkpoint with attention products in int8 too."""
    where = tmp_path_factory.mktemp(request.param)
    folder = tiny_towers.checkpoint(where / "model", request.param)
    (where / "int8").mkdir()
    settings = Quantize(id="quantize", attention=True, residual=True)
    settings.run(Artifact(folder, {"id": "model", "digest": "x"}), context_of(data, folder, where), where / "int8")
    return where / "int8"


@pytest.mark.parametrize("kind", [pytest.param("clip", marks=pytest.mark.slow), "siglip"])
def test_graphs_answer_as_torch_and_hold_their_tower_alone(kind: str, tmp_path: Path) -> None:
    folder = tiny_towers.checkpoint(tmp_path / "model", kind)
    model, prepared = load(folder), Checkpoint(folder).preprocessor(TASK, LENGTH, TARGET)
    rows: dict[str, list[Any]] = {"image": [tiny_towers.image("red", np.random.default_rng(0))], "text": ["a photo of a red", "a", "green"]}
    for name, tower in prepared.towers.items():
        path = export_float(Checkpoint(folder), tower, tmp_path / name / MODEL)
        graph = onnx.load(str(path)).graph
        assert [value.name for value in graph.input] == list(tower.input_names)
        own = {initializer.name for initializer in graph.initializer if initializer.name.endswith(("proj.weight", "fc1.weight"))}
        assert own
        assert all(weight.startswith("text_" if name == "text" else "visi") for weight in own)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for length in (None, *((16, LENGTH) if kind == "clip" and name == "text" else ())):
            features = tower.encode(rows[name], length)
            (found,) = session.run(["logits"], features)
            with torch.inference_mode():
                expected = model(**{key: torch.from_numpy(value) for key, value in features.items()}).logits.numpy()
            np.testing.assert_allclose(found, expected, atol=2e-6)
            np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_a_checkpoint_of_a_tower_has_its_layers_and_sites_alone(quantized: Path, tmp_path: Path) -> None:
    whole, kept = load_quantization(quantized)
    sites = load_sites(quantized)
    parts = {}
    for name in ("image", "text"):
        (tmp_path / name).mkdir()
        parts[name] = checkpoint_of_tower(Checkpoint(quantized), name, tmp_path / name).folder
    for name, prefix in (("image", "vis"), ("text", "text_")):
        layers, floating = load_quantization(parts[name])
        assert layers
        assert all(layer.startswith(prefix) for layer in layers)
        assert load_sites(parts[name]).names
        assert all(site.startswith(prefix) for site in load_sites(parts[name]).names)
        assert floating.keys() <= kept.keys()
    assert {layer for part in parts.values() for layer in load_quantization(part)[0]} == whole.keys()
    assert {site for part in parts.values() for site in load_sites(part).names} == set(sites.names)


def test_calibration_sees_each_tower_on_its_own_rows(data: Data, tmp_path: Path) -> None:
    folder = tiny_towers.checkpoint(tmp_path / "model")
    context = context_of(data, folder, tmp_path)
    made = {}
    for name, count in (("few", 8), ("many", 128)):
        (tmp_path / name).mkdir()
        settings = Quantize.model_validate({"id": "quantize", "calibration": {"rows": count}})
        made[name] = settings.run(Artifact(folder, {"id": "model", "digest": "x"}), context, tmp_path / name)
    for figures in made.values():
        layers = {layer["name"]: layer for layer in figures["layers"]}
        assert sum(name.startswith("text_model.encoder") for name in layers) == 6
        assert sum(name.startswith("vision_model.encoder") for name in layers) == 6
        assert all(layer["max_abs"] > 0 for layer in layers.values())
        assert all(layer["selection_max_abs"] > 0 for layer in layers.values())


def test_padding_behind_a_text_is_not_observed(data: Data, tmp_path: Path) -> None:
    from quantize.ptq import feature_batches

    rows = data.calibration(40).rows
    distinct = len({row for row in rows if isinstance(row, str)})
    assert distinct >= 5
    masks = {}
    for kind in ("clip", "siglip"):
        folder = tiny_towers.checkpoint(tmp_path / kind, kind)
        batches = list(feature_batches(folder, rows, context_of(data, folder, tmp_path), ""))
        assert all({"pixel_values", "input_ids"} <= batch.keys() for batch in batches)
        assert sum(len(batch["input_ids"]) for batch in batches) == sum(len(batch["pixel_values"]) for batch in batches) == 20
        masks[kind] = [batch["attention_mask"] for batch in batches if "attention_mask" in batch]
        assert len({tuple(row) for row in batches[0]["input_ids"][:distinct].tolist()}) == distinct  # those that differ come first
        if kind == "clip":
            for batch in batches:
                ends = (batch["input_ids"] == 0).int().argmax(dim=1)
                assert (batch["attention_mask"].sum(dim=1) == ends + 1).all()
    assert masks["siglip"] == []  # it reads its padding


def test_both_towers_are_built_counted_and_evaluated(quantized: Path, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.builds.planned", lambda context, *_: [Build("quantize", Checkpoint(quantized), "int8", "model")])
    context = context_of(data, quantized.parent / "model", tmp_path, quantized)
    (tmp_path / "out").mkdir()
    summary = Export(id="export").run(context.checkpoints["quantize"], context, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "export.json").read_text())
    (build,) = document["builds"]
    (engine,) = build["engines"]
    assert engine["runnable"]
    assert engine["towers"].keys() == {"image", "text"}
    files = [tmp_path / "out" / file for file in engine["towers"].values()]
    assert engine["size_bytes"] == sum(file.stat().st_size for file in files)
    names = {layer["name"] for layer in engine["layers"]}
    assert {"text_model.encoder.layers.0.mlp.fc1", "vision_model.encoder.layers.0.mlp.fc1"} <= names
    assert engine["int8_share"] > 0.9
    compared = {layer["layer"] for layer in engine["parity"]["layers"]}
    assert {"text_model.encoder.layers.0.mlp.fc1", "vision_model.encoder.layers.0.mlp.fc1"} <= compared
    assert all(layer["wrong_sums"] == 0 for layer in engine["parity"]["layers"])
    assert engine["n"] == 42
    assert summary["builds"][0]["engines"][0]["metrics"] == engine["metrics"]


class _Other(TowersExporter):
    """Answers of an engine whose text tower is another one."""

    def wrong(self, answers: NDArray[Any], side: int) -> NDArray[Any]:
        rows = self.gate.split.labels.array[:, 0] == side
        changed = answers.copy()
        changed[rows] = np.roll(answers[rows], 1, axis=1)
        return changed


@pytest.mark.parametrize(("side", "name"), [(0, "image"), (1, "text")])
def test_one_wrong_tower_does_not_pass(side: int, name: str, data: Data, tmp_path: Path) -> None:
    folder = tiny_towers.checkpoint(tmp_path / "model")
    context = context_of(data, folder, tmp_path)
    agreement = Agreement(context, Generation())
    (tmp_path / "out").mkdir()
    exporter = _Other(Build("model", Checkpoint(folder), "fp32", "model"), context, tmp_path / "out", "fp32", {}, agreement)
    right = exporter.gate.in_torch(Checkpoint(folder), "integers", len(exporter.gate.split))
    entry = Engine(engine="onnxruntime", mode="dynamic", float_precision="fp32")
    assert exporter._compared(entry, right).short is None
    assert exporter._compared(entry, exporter.wrong(right, side)).short is not None
    texts = exporter.gate.split.labels.array[:, 0] == 1
    one = right.copy()
    one[np.flatnonzero(texts if name == "text" else ~texts)[:3]] *= -1  # three rows of many
    reason = str(exporter._compared(entry, one).short)
    assert f"torch ({name}s)" in reason or "differ" in reason


def test_an_engine_gives_rows_to_their_tower() -> None:
    asked: list[tuple[str, str]] = []

    class One:
        def __init__(self, spec: EngineSpec) -> None:
            self.path = spec.path

        def predict(self, features: Any) -> Any:
            asked.append((self.path, next(iter(features))))
            return np.zeros((1, 2), np.float32)

        def precisions(self, gemms: Any, batch: int, sequence: int | None) -> dict[str, str]:
            return {self.path: str(sequence)}

        def placement(self) -> Any:
            assert any(path == self.path for path, _ in asked), "only engines that have run know where"
            return {"device": "cpu", "provider": "x", "float_precision": "fp32"}

        def probe(self, tensors: Any, features: Any) -> Any:
            return {"asked": np.array([self.path])}

    paths = {"image": "an image", "text": "a text"}
    spec = EngineSpec("onnxruntime", "dynamic", "fp32", "fp32", "cpu", 1, "an image", "folder", towers=paths)
    assert EngineSpec.from_message(json.loads(json.dumps(spec.message()))) == spec
    engine = Towers(spec, One)  # type: ignore[arg-type]
    engine.predict({"input_ids": np.zeros((1, 2))})
    assert engine.placement()["device"] == "cpu"
    engine.predict({"pixel_values": np.zeros((1, 2))})
    assert asked == [("a text", "input_ids"), ("an image", "pixel_values")]
    assert engine.precisions([], 1, None) == {"an image": "None"}
    assert engine.precisions([], 1, 16) == {"a text": "16"}
    assert engine.probe([], {"input_ids": np.zeros(1)})["asked"] == ["a text"]
