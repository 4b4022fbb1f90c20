import functools
import tempfile
from pathlib import Path

import pytest

from export.engines import onnxruntime, openvino
from export.engines.onnxruntime import OnnxRuntime
from export.engines.openvino import OpenVino
from export.engines.spec import EngineSpec
from export.graph.macs import Gemm, count_macs
from export.graph.qdq import insert_qdq
from export.share import share
from foundation.artifacts.exported import Layer
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from tests.export import tiny_checkpoints as tiny
from tests.seldom import seldom

pytestmark = pytest.mark.whole

GEMMS = [
    Gemm("a", "weight", 60, node="a/MatMul"),
    Gemm("b", "weight", 20, node="b/Gemm"),
    Gemm("c/qk", "attention", 15, node="c/qk"),
    Gemm("c/pv", "attention", 5, node="c/pv"),
]
_SCRATCH = tempfile.TemporaryDirectory(prefix="shares-")  # removed when the test run ends
ENGINES = [("openvino", "static"), ("openvino", "dynamic"), ("onnxruntime", "dynamic")]


def test_shares_are_fractions_of_macs() -> None:
    found = share(GEMMS, {"a/MatMul": "int8", "b/Gemm": "fp32", "c/qk": "int8", "c/pv": "fp32"})
    assert (found.int8_share, found.int8_share_all, found.int8_share_reason) == (60 / 80, 75 / 100, None)
    assert found.layers[1] == Layer(name="b", kind="weight", macs=20, precision="fp32")


def test_what_the_engine_does_not_tell_is_not_guessed() -> None:
    found = share(GEMMS, {"a/MatMul": "int8", "b/Gemm": "fp32", "c/pv": "fp32"})
    assert (found.int8_share, found.int8_share_all) == (60 / 80, None)
    assert found.int8_share_reason == "the engine's graph does not tell the precision of c/qk"
    found = share(GEMMS, {})
    assert found.int8_share is None
    assert found.int8_share_reason.endswith("of a, b, c/qk and 1 more")


@functools.cache
def graphs(family: str) -> tuple[Path, Path, frozenset[str]]:
    """Exports a family in float and with every linear layer of its blocks in int8, once; returns both files and these layers."""
    checkpoint, floating = tiny.exported(family)
    once = [gemm.name for gemm in count_macs(Graph(floating), 2, length(family)) if gemm.kind == "weight"]
    linears = [name for name in tiny.linears(tiny.load(checkpoint, family)) if "layer" in name and once.count(name) == 1]
    folder = Path(_SCRATCH.name) / family
    quantized = tiny.quantize(checkpoint, family, dict.fromkeys(linears, 0.05), folder / "quantized", largest=63)
    layers = tiny.linears(tiny.load(quantized, family))
    grid = tiny.with_weights(floating, {name: layers[name].weight.detach().numpy() for name in linears}, folder / "float.onnx")
    return floating, insert_qdq(Graph(grid), Checkpoint(quantized), folder / "model.onnx"), frozenset(linears)


def length(family: str) -> int | None:
    return None if family in tiny.IMAGES else 8


def open_one(engine: str, mode: str, model: Path, folder: Path, quantized: bool) -> OpenVino | OnnxRuntime:
    precision = "int8" if quantized else "fp32"
    path = openvino.convert(model, folder)[0] if engine == "openvino" else model
    path = onnxruntime.with_uint8_activations(model, folder) if engine == "onnxruntime" and quantized else path
    spec = EngineSpec(engine, mode, precision, "fp32", "cpu", 1, str(path), str(folder), (1, 2))
    return OpenVino(spec) if engine == "openvino" else OnnxRuntime(spec)


@pytest.mark.parametrize(("engine", "mode"), ENGINES)
def test_an_engine_tells_which_layers_are_int8(engine: str, mode: str, int8_build: Path, tmp_path: Path) -> None:
    model = int8_build / "model.onnx"
    gemms = count_macs(Graph(model), 4, 16)
    opened = open_one(engine, mode, model, tmp_path, quantized=True)
    found = share(gemms, opened.precisions([gemm.node for gemm in gemms], 4, 16))
    assert found.int8_share_reason is None
    for layer in found.layers:
        expected = "int8" if ".encoder." in layer.name and layer.kind == "weight" else "fp32"
        assert layer.precision == expected, layer
    assert 0.8 < found.int8_share_all < found.int8_share < 1


@pytest.mark.first(1)
@pytest.mark.parametrize(("engine", "mode"), ENGINES)
@pytest.mark.parametrize("family", seldom(tiny.CONFIGS, {*tiny.RELATIVES, "modernbert", "distilbert"}))
def test_every_gemm_of_every_family_is_found(family: str, engine: str, mode: str, tmp_path: Path) -> None:
    floating, integer, linears = graphs(family)
    for graph, wanted in ((floating, frozenset()), (integer, linears)):
        gemms = count_macs(Graph(graph), 2, length(family))
        opened = open_one(engine, mode, graph, tmp_path, quantized=graph == integer)
        found = share(gemms, opened.precisions([gemm.node for gemm in gemms], 2, length(family)))
        assert found.int8_share_reason is None
        assert {layer.name for layer in found.layers if layer.precision == "int8"} == wanted


def test_products_with_int4_weights_have_a_share_of_their_own() -> None:
    found = share(GEMMS, {"a/MatMul": "fp32", "b/Gemm": "w4a16", "c/qk": "fp32", "c/pv": "fp32"})
    assert (found.int4_share, found.int8_share) == (20 / 80, 0)
    assert share(GEMMS, {}).int4_share is None
