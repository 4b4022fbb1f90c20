"""Folders for the ONNX and OpenVINO backends of sentence-transformers: what they read gives the vectors of our engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from onnxruntime import InferenceSession

from compress.recipe import check
from compress.run.prepare import prepare
from export.builds import Build
from export.export import Export
from export.folders.source import PLACE, Source
from export.folders.table import FORMATS
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.document import read
from foundation.artifacts.exported import Exported
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.models.importing import import_model
from quantize.quantize import Quantize
from tests import tiny_embedding
from tests.export import sentiment
from tests.problems import raises_problem

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

TEXTS = ["a fine film", "it was very dull this movie", "love"]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last two stages of a run: a quantized checkpoint, and the one build that is made of it."""
    folder = tmp_path_factory.mktemp("vectors")
    given = tiny_embedding.recipe("tiny", tiny_embedding.folder(folder / "source"), tiny_embedding.pairs(folder / "data", 80, 12))
    given["model"]["embedding"] = {"dimensions": 8}
    target = {"engines": ["openvino", "onnxruntime"], "batch_sizes": [1], "sequence_lengths": [8], "threads": 1}
    recipe = check({**given, "target": target, "stages": [{"quantize": {}}]})
    floating, quantized, exported = (folder / name for name in ("float", "stages/quantize-0", "stages/export-0"))
    for out in (floating, quantized, exported):
        out.mkdir(parents=True)
    context = prepare(recipe, folder, ConsoleProgress("silent"))
    import_model(recipe.model, context.data.labels, 0, floating)
    model = Artifact(floating, {"id": "baseline", "stage": "model", "digest": "0" * 64})
    context = replace(context, checkpoints={"baseline": model}, teachers=(model,))
    Quantize(id="quantize", calibration={"rows": 64}).run(model, context, quantized)
    last = Artifact(quantized, {"id": "quantize", "digest": "1" * 64})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("export.engines.openvino.computes_bf16", lambda: False)
        patch.setattr("export.builds.planned", lambda *given: [Build("quantize", Checkpoint(quantized), "int8", "quantize")])
        Export(id="export").run(last, replace(context, checkpoints={"quantize": last}), exported)
    return folder / "stages"


@pytest.fixture(scope="module")
def source(stages: Path) -> Source:
    exported = next(stages.glob("export-*"))
    checkpoint = Checkpoint(next(stages.glob("quantize-*")))
    return Source("quantize", checkpoint, "sentence-embedding", exported, read(Exported, exported / "export.json").builds)


def features(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    prepared = checkpoint.preprocessor("sentence-embedding", sentiment.LENGTH, Target(sequence_lengths=(8,)))
    return dict(prepared.encode(TEXTS, 0))


def published(form: str, source: Source, out: Path) -> Path:
    """Writes a folder, and runs its first snippet."""
    out.mkdir()
    found = FORMATS[form].write(source, out)
    assert found.library == "sentence-transformers"
    names: dict[str, Any] = {}
    exec(found.snippets[0].code.replace(PLACE, str(out)), names)
    assert names["vectors"].shape == (1, 8)
    return out


def test_onnx_gets_the_vectors_of_our_engine_as_one_token(source: Source, tmp_path: Path) -> None:
    given, out = features(source.checkpoint), published("onnx", source, tmp_path / "out")
    ours = InferenceSession(source.engine(".onnx", "").file).run(["logits"], given)[0]
    (found,) = InferenceSession(out / "onnx" / "model_quantized.onnx").run(["last_hidden_state"], given)
    assert (ours.shape, found.shape) == ((3, 8), (3, 1, 8))
    np.testing.assert_array_equal(found[:, 0], ours)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)


def test_openvino_gets_the_vectors_of_our_engine_as_one_token(source: Source, tmp_path: Path) -> None:
    given, out = features(source.checkpoint), published("openvino", source, tmp_path / "out")
    core, hint = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    before, after = (
        core.compile_model(core.read_model(file), "CPU", hint) for file in (source.engine(".xml", "").file, out / "openvino_model.xml")
    )
    assert [output.any_name for output in after.outputs] == ["last_hidden_state"]
    np.testing.assert_array_equal(after(given)[0][:, 0], before(given)[0])
    layers = {str(node.get_rt_info()["runtimePrecision"].value) for node in after.get_runtime_model().get_ops()}
    assert layers & {"i8", "u8"}  # it still computes in integers


@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_the_settings_are_those_that_sentence_transformers_reads(form: str, source: Source, tmp_path: Path) -> None:
    out = published(form, source, tmp_path / "out")
    assert [entry["path"] for entry in json.loads((out / "modules.json").read_text())] == ["", "1_Pooling"]
    before, after = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (source.checkpoint.folder, out))
    assert before["tokenizer_class"] == "TokenizersBackend"  # which Transformers 4 does not know
    assert after["tokenizer_class"] == "PreTrainedTokenizerFast"
    pooling: Any = json.loads((out / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 8
    assert {key: value for key, value in pooling.items() if key.startswith("pooling_mode")} == {
        "pooling_mode_mean_tokens": False,  # sentence-transformers takes it as given where it is missing
        "pooling_mode_cls_token": True,
        "pooling_mode_lasttoken": False,
        "pooling_mode_weightedmean_tokens": False,
    }
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "tokenizer.json", "sentence_bert_config.json", "config_sentence_transformers.json"} <= names
    assert not [name for name in names if name.endswith(".safetensors")]


@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_a_checkpoint_of_another_task_is_refused(form: str, source: Source, tmp_path: Path) -> None:
    key = str(sentiment.checkpoint())
    with raises_problem(key, "no model whose answers are vectors of texts"):
        FORMATS[form].write(replace(source, checkpoint=Checkpoint(sentiment.checkpoint())), tmp_path)
    assert list(tmp_path.iterdir()) == []
