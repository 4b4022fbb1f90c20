"""Folders for other programs: the names that these look for, the answers of the run's engines, and snippets that run as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime import InferenceSession
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from export import compressed_tensors
from export.engines.onnxruntime import open_engine as open_onnxruntime
from export.engines.openvino import convert
from export.engines.openvino import open_engine as open_openvino
from export.engines.spec import EngineSpec
from export.folders import onnx_folder, openvino_folder
from export.folders.source import PLACE, Source, Written
from export.folders.table import FORMATS
from foundation.artifacts import exported
from foundation.core.errors import InputError
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.models.own_shape import SHAPE_KEY
from foundation.standalone.preprocess import Preprocessor
from tests.export import sentiment
from tests.export import test_compressed_tensors as decoders

ROWS = sentiment.rows(6)
FILES = {"onnxruntime": "model_uint8.onnx", "openvino": "openvino.xml"}
HINT = {"INFERENCE_PRECISION_HINT": "f32"}


def source(build: Path, checkpoint: Path, precision: str = "int8", task: str = "text-classification") -> Source:
    """A variant with two engines, as the export of a run lists them."""
    engines = tuple(
        exported.Engine(engine=name, mode="dynamic", file=f"{build.name}/{file}", runnable=True, float_precision="fp32", properties=HINT)
        for name, file in FILES.items()
        if (build / file).is_file()
    )
    entry = exported.Build(variant="quantize", precision=precision, float_precision="fp32", folder=build.name, engines=engines)
    return Source("quantize", Checkpoint(checkpoint), task, build.parent, (entry,))


def published(form: str, given: Source, out: Path) -> Written:
    out.mkdir()
    return FORMATS[form].write(given, out)


def answers(build: Path, engine: str, prepared: Preprocessor) -> np.ndarray:
    """What the engine of the run answers."""
    spec = EngineSpec(engine, "dynamic", "int8", "fp32", "cpu", 1, str(build / FILES[engine]), str(build))
    opened: Any = {"onnxruntime": open_onnxruntime, "openvino": open_openvino}[engine](spec)
    logits: np.ndarray = opened.predict(prepared.encode(ROWS, 0))
    return logits


def executed(code: str, folder: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code.replace(PLACE, str(folder)), "snippet", "exec"), names)
    return names


def test_onnx_runtime_with_default_settings_gives_the_logits_of_the_engine(
    int8_build: Path, prepared: Preprocessor, tmp_path: Path
) -> None:
    found = published("onnx", source(int8_build, sentiment.quantized()), tmp_path / "out")
    assert sorted(file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*.*")) == [
        "config.json", "onnx/model_quantized.onnx", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    session = InferenceSession(tmp_path / "out" / "onnx" / "model_quantized.onnx")
    (logits,) = session.run(["logits"], dict(prepared.encode(ROWS, 0)))
    np.testing.assert_array_equal(logits, answers(int8_build, "onnxruntime", prepared))
    assert found.built is not None
    assert found.built.engine.engine == "onnxruntime"


@pytest.mark.whole
def test_openvino_gives_the_logits_of_the_engine(int8_build: Path, prepared: Preprocessor, tmp_path: Path) -> None:
    published("openvino", source(int8_build, sentiment.quantized()), tmp_path / "out")
    assert {"openvino_model.xml", "openvino_model.bin", "config.json", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "out").iterdir()
    }
    model = openvino.Core().compile_model(tmp_path / "out" / "openvino_model.xml", "CPU", HINT)
    logits = model(dict(prepared.encode(ROWS, 0)))["logits"]
    np.testing.assert_array_equal(logits, answers(int8_build, "openvino", prepared))


def test_transformers_loads_the_weights_on_their_grid(prepared: Preprocessor, int8_build: Path, tmp_path: Path) -> None:
    found = published("transformers", source(int8_build, sentiment.quantized()), tmp_path / "out")
    features = {name: torch.from_numpy(value) for name, value in prepared.encode(ROWS, 0).items()}
    with torch.no_grad():
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")(**features).logits
        ours = load_float(sentiment.quantized())(**features).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert not found.as_torch  # whose figures are of int8 activations
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    assert published("transformers", source(int8_build, sentiment.checkpoint(), "fp32"), tmp_path / "float").as_torch


@pytest.mark.parametrize("form", ["transformers", "onnx", "openvino"])
def test_snippets_run_as_they_are(form: str, int8_build: Path, tmp_path: Path) -> None:
    found = published(form, source(int8_build, sentiment.quantized()), tmp_path / "out")
    names = executed(found.snippets[0].code, tmp_path / "out")
    logits = names["outputs"].logits.detach().numpy() if form == "transformers" else names["logits"]
    assert logits.shape == (1, 2)
    for snippet in found.snippets:
        if snippet.language == "python":
            compile(snippet.code, snippet.title, "exec")  # Optimum is not installed here
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert tokenizer == ("PreTrainedTokenizerFast" if form != "transformers" else json.loads(
        (sentiment.quantized() / "tokenizer_config.json").read_text())["tokenizer_class"])  # fmt: skip


def test_the_name_of_a_graph_says_how_wide_its_weights_are(int8_build: Path) -> None:
    names = [
        onnx_folder.file_name(source(int8_build, folder))
        for folder in (sentiment.checkpoint(), sentiment.quantized(), decoders.quantized("w4a16"))
    ]
    assert names == ["model.onnx", "model_quantized.onnx", "model_q4.onnx"]
    assert [onnx_folder.DTYPES[name] for name in names] == ["fp32", "q8", "q4"]


def test_weights_in_a_file_of_their_own_have_the_name_that_is_downloaded(
    int8_build: Path, prepared: Preprocessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.graph.onnx.EXTERNAL_ABOVE", 0)
    published("onnx", source(int8_build, sentiment.quantized()), tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out" / "onnx").iterdir()) == ["model_quantized.onnx", "model_quantized.onnx_data"]
    (logits,) = InferenceSession(tmp_path / "out/onnx/model_quantized.onnx").run(["logits"], dict(prepared.encode(ROWS, 0)))
    np.testing.assert_array_equal(logits, answers(int8_build, "onnxruntime", prepared))


def test_both_ends_of_a_span_are_outputs(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", 2])
    given = helper.make_tensor_value_info("given", TensorProto.FLOAT, ["batch", "sequence", 2])
    graph = helper.make_graph([helper.make_node("Identity", ["given"], ["logits"])], "spans", [given], [value])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    numbers = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32)
    session = InferenceSession(onnx_folder.as_spans(model).SerializeToString())
    convert(tmp_path / "model.onnx", tmp_path, {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})
    openvino_folder._write_network(tmp_path / "openvino.xml", tmp_path / "openvino_model.xml", spans=True)
    network = openvino.Core().read_model(tmp_path / "openvino_model.xml")
    assert network.get_rt_info(["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]).value == "0"
    theirs = openvino.Core().compile_model(network, "CPU", HINT)(numbers)
    for place, name in enumerate(["start_logits", "end_logits"]):
        np.testing.assert_array_equal(session.run([name], {"given": numbers})[0], numbers[..., place])
        np.testing.assert_array_equal(theirs[name], numbers[..., place])


@pytest.mark.parametrize("scheme", ["w8a8", decoders.ZERO_POINTS])
def test_decoders_in_compressed_tensors_hold_the_codes(scheme: str, tmp_path: Path) -> None:
    checkpoint = decoders.quantized(scheme)
    found = published("compressed-tensors", source(tmp_path, checkpoint, task="text-generation"), tmp_path / "out")
    compressed_tensors.write(Checkpoint(checkpoint), tmp_path / "alone")
    ours, alone = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "alone" / "model.safetensors")
    assert ours.keys() == alone.keys()
    assert all(torch.equal(tensor, alone[name]) for name, tensor in ours.items())
    assert ("CompressedTensorsConfig(dequantize=True)" in found.snippets[0].code) == (scheme == decoders.ZERO_POINTS)
    compile(found.snippets[0].code, "snippet", "exec")
    assert found.as_torch


@pytest.mark.parametrize(("hint", "remarks"), [("f32", ()), ("bf16", (openvino_folder.NEEDS_BF16,))])
def test_a_decoder_as_openvino_is_the_folder_that_answered_in_the_run(hint: str, remarks: tuple[str, ...], tmp_path: Path) -> None:
    given = {openvino_folder.PRECISION: hint, "KV_CACHE_PRECISION": "f32", "ATTENTION_BACKEND": "PA", "INFERENCE_NUM_THREADS": "1"}
    genai = tmp_path / "quantize-int8" / "genai"
    genai.mkdir(parents=True)
    for name in ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "generation_config.json", "tokenizer.json"):
        (genai / name).write_text(f"{name} of the engine")
    file = "quantize-int8/genai/openvino_model.xml"
    engine = exported.Engine(engine="openvino_genai", mode="paged", file=file, runnable=True, properties=given)
    build = exported.Build(variant="quantize", precision="int8", float_precision="fp32", engines=(engine,))
    found = published(
        "openvino", Source("quantize", Checkpoint(decoders.quantized("w8a8")), "text-generation", tmp_path, (build,)), tmp_path / "out"
    )
    for copied in genai.iterdir():
        assert (tmp_path / "out" / copied.name).read_bytes() == copied.read_bytes()
    assert (tmp_path / "out" / "config.json").is_file()
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert found.remarks == remarks
    properties = f'{{"INFERENCE_PRECISION_HINT": "{hint}", "KV_CACHE_PRECISION": "f32", "ATTENTION_BACKEND": "PA"}}'  # no number of threads
    assert f"**{properties})" in found.snippets[0].code
    assert f'ov_config={{"INFERENCE_PRECISION_HINT": "{hint}", "KV_CACHE_PRECISION": "f32"}}' in found.snippets[1].code


def test_what_a_format_cannot_hold_is_refused_in_one_line(int8_build: Path, tmp_path: Path) -> None:
    pruned = tmp_path / "pruned"
    pruned.mkdir()
    config = json.loads((sentiment.checkpoint() / "config.json").read_text())
    (pruned / "config.json").write_text(json.dumps({**config, SHAPE_KEY: {"model_type": "bert"}}))
    given, nothing = source(int8_build, sentiment.quantized()), replace(source(int8_build, sentiment.quantized()), builds=())
    for number, (form, wrong, line) in enumerate(
        (
            ("transformers", source(int8_build, pruned), "layers differ in size.*publish it as onnx or openvino"),
            ("onnx", nothing, "name onnxruntime in target.engines"),
            ("openvino", nothing, "name openvino in target.engines"),
            ("onnx", replace(given, task="text-generation"), "a language model.*past_key_values"),
            ("onnx", replace(given, task="image-text"), "two towers"),
            ("openvino", replace(given, task="text-to-text"), "an encoder-decoder"),
            ("openvino", replace(given, task="text-generation"), "name openvino_genai in target.engines"),
            ("compressed-tensors", source(int8_build, sentiment.checkpoint(), "fp32"), "no quantized text model"),
            ("compressed-tensors", replace(given, task="text-to-text"), "no quantized text model"),
        )
    ):
        with pytest.raises(InputError, match=line) as caught:
            published(form, wrong, tmp_path / str(number))
        assert len(caught.value.lines) == 1
