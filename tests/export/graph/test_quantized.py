"""Every scheme through the stage: what is built, what is refused and why, what agrees with torch."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from export.builds import Build
from export.choices import Generation
from export.engines import openvino
from export.engines.openvino import GROUP, runtime_options
from export.engines.registry import engine_module, open_engine
from export.engines.spec import EngineSpec
from export.engines.tensorrt import NO_DYNAMIC, NO_ZERO_POINTS
from export.export import Export
from export.exporter import Exporter
from export.generation.agreement import Agreement
from export.graph.macs import count_macs
from export.graph.onnx import export_float
from export.graph.qdq_schemes import insert_dynamic
from export.graph.quantized import precision_of, write_graphs
from export.parity.dynamic import compare_all, dynamic_gemms
from export.share import share
from foundation.artifacts.graph import Graph
from foundation.core.target import Target
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.fp8 import Fp8Scales
from foundation.schemes.int4 import Int4Scales, group_range, group_scale
from foundation.schemes.int8 import DynamicScales, weight_scale
from foundation.schemes.int8_weights import WeightScales
from foundation.standalone.preprocess import Preprocessor
from tests.export import sentiment
from tests.problems import raises_problem
from tests.seldom import seldom

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

SCRATCH = tempfile.TemporaryDirectory(prefix="schemes-")


def with_zero_points(weight: torch.Tensor, group_size: int) -> Int4Scales:
    scale, zero_point = group_range(weight, group_size)[:2]
    return Int4Scales(scale, group_size, zero_point)


@functools.cache
def quantized(scheme: str, group_size: int = 16) -> Path:
    """Writes the tiny sentiment classifier with the layers of its encoder in a scheme."""
    folder = Path(SCRATCH.name) / f"{scheme}-{group_size}"
    folder.mkdir()
    model, scales = load(sentiment.checkpoint()), {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".encoder." in name:
            weight = layer.weight.data
            scales[name] = {
                "w8a8-dynamic": lambda weight=weight: DynamicScales(weight_scale(weight, 63), 7),
                "w8a16": lambda weight=weight: WeightScales(weight_scale(weight, 127)),
                "w4a16": lambda weight=weight: Int4Scales(group_scale(weight, group_size), group_size),
                "w4a16, zero points": lambda weight=weight: with_zero_points(weight, group_size),
                "fp8": lambda weight=weight: Fp8Scales(weight_scale(weight, 448), torch.tensor(0.01)),
            }[scheme]()
            layer.weight.data = scales[name].on_grid(weight)
    save(model, sentiment.checkpoint(), folder, "Quantized")
    save_quantization(folder, scales, {"classifier": "head"})
    return folder


@functools.cache
def graphs(scheme: str) -> Path:
    """Writes the graphs of a scheme; returns the folder."""
    folder = Path(SCRATCH.name) / f"graphs-{scheme}"
    prepared = Checkpoint(quantized(scheme)).preprocessor("text-classification", sentiment.LENGTH, sentiment.TARGET)
    folder.mkdir()
    prepared.save(folder)
    write_graphs(Checkpoint(quantized(scheme)), prepared, folder / "model.onnx", ("onnxruntime", "openvino"))
    return folder


def opened(engine: str, mode: str, scheme: str, file: str) -> Any:
    folder, precision = graphs(scheme), precision_of(Checkpoint(quantized(scheme)))
    return open_engine(EngineSpec(engine, mode, precision, "fp32", "cpu", 1, str(folder / file), str(folder)))  # type: ignore[arg-type]


def exporter(scheme: str, tmp_path: Path, *engines: Any) -> Exporter:
    target = replace_engines(sentiment.TARGET, engines)
    context = sentiment.context(tmp_path / "scratch", {"baseline": sentiment.checkpoint(), "quantize": quantized(scheme)}, target)
    (tmp_path / "out").mkdir()
    build = Build("quantize", Checkpoint(quantized(scheme)), precision_of(Checkpoint(quantized(scheme))), "baseline")
    return Exporter(build, context, tmp_path / "out", "fp32", {}, Agreement(context, Generation()))


def replace_engines(target: Target, engines: tuple[Any, ...]) -> Target:
    return target.model_copy(update={"engines": engines})


def told(engine: Any, scheme: str) -> dict[str, Any]:
    gemms = count_macs(Graph(graphs(scheme) / "model.onnx"), 2, 16)
    return share(gemms, engine.precisions([gemm.node for gemm in gemms], 2, 16)).written()


def test_dynamic_int8_multiplies_the_integers_of_torch_in_onnxruntime(tmp_path: Path) -> None:
    entry = exporter("w8a8-dynamic", tmp_path, "onnxruntime").run().written()
    (engine,) = entry["engines"]
    assert (entry["precision"], engine["runnable"]) == ("int8-dynamic", True)
    assert engine["file"].endswith("model_dynamic.onnx")
    assert engine["int8_share"] > 0.9
    layers = engine["parity"]["layers"]
    assert len(layers) == sum(".encoder." in layer["name"] for layer in engine["layers"] if layer["kind"] == "weight")
    assert all(layer["wrong_sums"] == 0 and layer["different"] == layer["allowed"] for layer in layers)


def test_openvino_does_not_tell_whether_it_quantized_and_nothing_is_claimed() -> None:
    folder = graphs("w8a8-dynamic")
    openvino.convert(folder / "model.onnx", folder, runtime_options("int8-dynamic", folder / "model.onnx"))
    assert GROUP in (folder / "openvino.xml").read_text()
    found = told(opened("openvino", "dynamic", "w8a8-dynamic", "openvino.xml"), "w8a8-dynamic")
    assert found["int8_share"] is None
    assert "does not tell the precision of bert.encoder.layer.0" in found["int8_share_reason"]


@pytest.mark.parametrize("scheme", seldom(["w4a16", "w4a16, zero points"], ["w4a16"]))
@pytest.mark.parametrize(("engine", "file"), [("openvino", "openvino.xml"), ("onnxruntime", "model.onnx")])
def test_int4_weights_meet_float_activations(engine: str, file: str, scheme: str) -> None:
    folder = graphs(scheme)
    if engine == "openvino":
        openvino.convert(folder / "model.onnx", folder, runtime_options("w4a16", folder / "model.onnx"))
    running, features = opened(engine, "dynamic", scheme, file), Preprocessor.load(folder).encode(sentiment.rows(5))
    with torch.inference_mode():
        expected = forward(load(quantized(scheme)), {name: torch.from_numpy(value) for name, value in features.items()})
    np.testing.assert_allclose(running.predict(features), expected.numpy(), atol=1e-3)
    found = told(running, scheme)
    assert found["int8_share"] == 0
    assert {layer["precision"] for layer in found["layers"] if ".encoder." in layer["name"] and layer["kind"] == "weight"} == {"w4a16"}


def test_what_an_engine_cannot_take_has_a_reason_in_one_line(tmp_path: Path) -> None:
    made = exporter("fp8", tmp_path, "openvino", "onnxruntime")
    for name in ("openvino", "onnxruntime"):
        (engine,) = made._build(name, tmp_path / "model.onnx")  # type: ignore[arg-type]
        assert (engine.runnable, engine.file, engine.size_bytes) == (False, None, 0)
        assert "has no FP8 products" in str(engine.reason)
    assert engine_module("tensorrt").refusal("int8-dynamic", tmp_path) == NO_DYNAMIC
    assert engine_module("torch").refusal("fp8", tmp_path) is None
    assert engine_module("tensorrt").refusal("fp8", tmp_path) is None


def test_tensorrt_has_no_zero_points_and_says_so() -> None:
    for scheme, reason in (("w4a16", None), ("w4a16, zero points", NO_ZERO_POINTS)):
        assert engine_module("tensorrt").refusal("w4a16", graphs(scheme) / "model.onnx") == reason


def test_tensorrt_has_no_int8_weights_with_float_activations_and_says_so() -> None:
    assert "w8a8" in str(engine_module("tensorrt").refusal("w8a16", graphs("w8a16") / "model.onnx"))


def test_parity_holds_for_int8_weights_multiplied_in_float(tmp_path: Path) -> None:
    entry = exporter("w8a16", tmp_path, "openvino", "onnxruntime").run().written()
    assert entry["precision"] == "w8a16"
    assert all(engine["runnable"] for engine in entry["engines"])
    for engine in entry["engines"]:
        assert engine["int8_share"] == 0, "no product is of integers"
        assert {layer["precision"] for layer in engine["layers"] if ".encoder." in layer["name"] and layer["kind"] == "weight"} == {"w8a16"}


def test_parity_holds_for_weights_with_zero_points(tmp_path: Path) -> None:
    entry = exporter("w4a16, zero points", tmp_path, "openvino", "onnxruntime", "tensorrt").run().written()
    assert entry["precision"] == "w4a16"
    assert {(engine["engine"], engine["runnable"]) for engine in entry["engines"]} == {
        ("openvino", True),
        ("onnxruntime", True),
        ("tensorrt", False),
    }
    for engine in entry["engines"]:
        if engine["runnable"]:
            named = {layer["precision"] for layer in engine["layers"] if ".encoder." in layer["name"] and layer["kind"] == "weight"}
            assert named - {None} == {"w4a16"}
            assert None not in named or engine["mode"] == "static"  # OpenVINO names no layer of some products there
        else:
            assert engine["reason"] == NO_ZERO_POINTS


def test_groups_of_unequal_width_are_refused_for_openvino_alone(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.zeros((24, 4), np.int8), "a.weight.codes")
    node = onnx.helper.make_node("DequantizeLinear", ["a.weight.codes", "s"], ["w"], axis=0, block_size=16)
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [], [weights])), tmp_path / "m.onnx")
    reason = engine_module("openvino").refusal("w4a16", tmp_path / "m.onnx")
    assert reason == (
        "OpenVINO reads groups of equal width alone: a has 24 inputs, no multiple of group_size 16; give a group_size that divides them"
    )
    assert engine_module("onnxruntime").refusal("w4a16", tmp_path / "m.onnx") is None
    assert runtime_options("w4a16", tmp_path / "m.onnx") == {GROUP: "0"}
    assert runtime_options("int8", tmp_path / "m.onnx") == {}


@pytest.mark.parametrize("spoiled", ["codes", "sums"])
def test_parity_of_tokens_finds_what_is_wrong(spoiled: str) -> None:
    folder = graphs("w8a8-dynamic")
    gemms = dynamic_gemms(Graph(folder / "model_dynamic.onnx"))
    features = Preprocessor.load(folder).encode(sentiment.rows(3))
    tensors = opened("onnxruntime", "dynamic", "w8a8-dynamic", "model_dynamic.onnx").probe(
        [name for gemm in gemms for name in gemm.tensors], features
    )
    assert all(layer.passed for layer in compare_all(gemms, tensors))
    first = gemms[0]
    if spoiled == "codes":
        tensors[first.codes] = np.clip(tensors[first.codes] + 1, -127, 127)
    else:
        tensors[first.output] = tensors[first.output] * np.float32(1.001)
    found = compare_all(gemms, tensors)
    assert (found[0].different > found[0].allowed) == (spoiled == "codes")
    assert next(layer.layer for layer in found if not layer.passed) == first.layer


def test_compressed_tensors_is_for_quantized_decoders(tmp_path: Path) -> None:
    context = sentiment.context(tmp_path, {"baseline": sentiment.checkpoint(), "quantize": quantized("w4a16")})
    assert Export()._compressed(context, tmp_path) is None
    with raises_problem("stages.export.compressed_tensors", "quantize is no quantized decoder"):
        Export(compressed_tensors=True)._compressed(context, tmp_path)


def test_a_quantized_decoder_is_written_for_others_too(tmp_path: Path) -> None:
    from tests.export import test_compressed_tensors as decoders

    context = sentiment.context(tmp_path, {"baseline": decoders.llama(), "quantize": decoders.quantized("w4a16")})
    assert Export()._compressed(context, tmp_path) == "quantize-compressed-tensors"
    config = json.loads((tmp_path / "quantize-compressed-tensors" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert Export(compressed_tensors=False)._compressed(context, tmp_path) is None


def test_the_graph_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    floating = export_float(Checkpoint(quantized("w4a16")), Preprocessor.load(graphs("w4a16")), tmp_path / "float.onnx")
    with pytest.raises(ValueError, match="not on the grid"):
        insert_dynamic(Graph(floating), Checkpoint(quantized("w8a8-dynamic")), tmp_path / "out.onnx")
