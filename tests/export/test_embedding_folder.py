"""The folder for sentence-transformers' own backends: what they read gives the vectors of our engines, and what is refused."""

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
from export.embedding_folder import write_folder
from export.export import Export
from export.folders.source import PLACE, Source
from export.folders.table import FORMATS
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.document import read
from foundation.artifacts.exported import Exported
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.models.importing import import_model
from quantize.quantize import Quantize
from tests import tiny_embedding
from tests.export import sentiment

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


def parts(stages: Path) -> tuple[Checkpoint, Path]:
    return Checkpoint(next(stages.glob("quantize-*"))), next(stages.glob("export-*")) / "quantize-int8"


def features(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    prepared = checkpoint.preprocessor("sentence-embedding", sentiment.LENGTH, Target(sequence_lengths=(8,)))
    return dict(prepared.encode(TEXTS, 0))


def test_both_backends_get_the_vectors_of_our_engines_as_one_token(stages: Path, tmp_path: Path) -> None:
    checkpoint, build = parts(stages)
    out = write_folder(checkpoint, build, tmp_path / "out")
    given = features(checkpoint)
    entries = {entry["engine"]: entry for entry in json.loads((build.parent / "export.json").read_text())["builds"][-1]["engines"]}
    ours = InferenceSession(build.parent / entries["onnxruntime"]["file"]).run(["logits"], given)[0]
    (found,) = InferenceSession(out / "onnx" / "model.onnx").run(["last_hidden_state"], given)
    assert (ours.shape, found.shape) == ((3, 8), (3, 1, 8))
    np.testing.assert_array_equal(found[:, 0], ours)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
    core, hint = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    before, after = (
        core.compile_model(core.read_model(file), "CPU", hint)
        for file in (build.parent / entries["openvino"]["file"], out / "openvino" / "openvino_model.xml")
    )
    assert [output.any_name for output in after.outputs] == ["last_hidden_state"]
    np.testing.assert_array_equal(after(given)[0][:, 0], before(given)[0])
    layers = {str(node.get_rt_info()["runtimePrecision"].value) for node in after.get_runtime_model().get_ops()}
    assert layers & {"i8", "u8"}  # it still computes in integers


def test_the_files_are_those_that_sentence_transformers_reads(stages: Path, tmp_path: Path) -> None:
    out = write_folder(*parts(stages), tmp_path / "out")
    assert [entry["path"] for entry in json.loads((out / "modules.json").read_text())] == ["", "1_Pooling"]
    before, after = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (parts(stages)[0].folder, out))
    assert before["tokenizer_class"] == "TokenizersBackend"  # which Transformers 4 does not know
    assert after == {**before, "tokenizer_class": "PreTrainedTokenizerFast"}
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


def test_published_folders_hold_the_same_vectors_under_the_names_of_each_format(stages: Path, tmp_path: Path) -> None:
    checkpoint, build = parts(stages)
    exported = read(Exported, build.parent / "export.json")
    source = Source("quantize", checkpoint, "sentence-embedding", build.parent, exported.builds)
    given, alone = features(checkpoint), write_folder(checkpoint, build, tmp_path / "alone")
    graphs = {"onnx": "onnx/model_quantized.onnx", "openvino": "openvino_model.xml"}
    for form, name in graphs.items():
        (tmp_path / form).mkdir()
        found = FORMATS[form].write(source, tmp_path / form)
        assert found.library == "sentence-transformers"
        assert {"modules.json", "1_Pooling", "config.json", "tokenizer.json", name.partition("/")[0]} <= {
            file.name for file in (tmp_path / form).iterdir()
        }
        names: dict[str, Any] = {}
        exec(found.snippets[0].code.replace(PLACE, str(tmp_path / form)), names)
        assert names["vectors"].shape == (1, 8)
    (expected,) = InferenceSession(alone / "onnx" / "model.onnx").run(["last_hidden_state"], given)
    (vectors,) = InferenceSession(tmp_path / "onnx" / graphs["onnx"]).run(["last_hidden_state"], given)
    np.testing.assert_array_equal(vectors, expected)
    core, hint = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    theirs, ours = (
        core.compile_model(file, "CPU", hint)(given)[0]
        for file in (alone / "openvino/openvino_model.xml", tmp_path / "openvino" / graphs["openvino"])
    )
    np.testing.assert_array_equal(ours, theirs)


def test_what_cannot_be_written_is_refused_in_one_line(stages: Path, tmp_path: Path) -> None:
    checkpoint, build = parts(stages)
    (tmp_path / "there").mkdir()
    for wrong, line in (
        ((checkpoint, build, tmp_path / "there"), "there: exists; give a folder that does not"),
        ((Checkpoint(sentiment.checkpoint()), build, tmp_path / "a"), "no model whose answers are vectors of texts"),
        ((checkpoint, build.with_name("other"), tmp_path / "b"), "no such build; .*quantize-int8"),
        ((checkpoint, checkpoint.folder, tmp_path / "c"), "no export.json; give a folder of a build"),
    ):
        with pytest.raises(InputError, match=line) as caught:
            write_folder(*wrong)
        assert len(caught.value.lines) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
