"""The folder for sentence-transformers: integer weights are multiplied with float activations in sessions with default settings too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import openvino
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

from export.engines.onnxruntime import properties
from export.engines.openvino import GROUP, convert
from export.folders.hidden_states import as_hidden_states, with_float_activations, write_network
from export.graph.onnx import save
from foundation.standalone.onnx_decoder import session_options

INPUTS, OUTPUTS, BLOCK = 64, 48, 16
FORMS = ["MatMul", "Gemm", "Gemm, transposed"]
SCHEMES = ["w8a16", "w4a16", "w4a16, zero points"]
DRAWN = np.random.default_rng(0).standard_normal((5, INPUTS)).astype(np.float32)


def graph(form: str, scheme: str, quantized: bool = False) -> onnx.ModelProto:
    """Returns one layer as `export.graph.qdq_schemes` writes it; `quantized` puts a QuantizeLinear and a DequantizeLinear before it."""
    random, transposed = np.random.default_rng(1), form.endswith("transposed")
    codes_OI = random.integers(-7, 8, (OUTPUTS, INPUTS)).astype(np.int8)
    scale = (0.1 * random.random((OUTPUTS, INPUTS // BLOCK) if scheme.startswith("w4") else OUTPUTS)).astype(np.float32)
    turned = (lambda array: array) if transposed or scale.ndim == 1 else np.transpose
    codes_OI = codes_OI if transposed else codes_OI.T
    blocks: dict[str, Any] = {"axis": int(not transposed)}
    arrays = {"codes": codes_OI, "scale": turned(scale)}
    if scheme.startswith("w4"):
        blocks = {"axis": int(transposed), "block_size": BLOCK}
        arrays["codes"] = codes_OI.astype(ml_dtypes.int4)
    if scheme.endswith("zero points"):
        arrays["codes"] = (codes_OI + 8).astype(ml_dtypes.uint4)
        arrays["zero_point"] = np.full(arrays["scale"].shape, 8).astype(ml_dtypes.uint4)
    if form != "MatMul":
        arrays["bias"] = random.random(OUTPUTS).astype(np.float32)
    nodes = [helper.make_node("DequantizeLinear", [name for name in arrays if name != "bias"], ["weight"], "weight", **blocks)]
    if quantized:
        arrays["step"] = np.float32(0.02)
        nodes.append(helper.make_node("QuantizeLinear", ["x", "step"], ["q"], "q", output_dtype=TensorProto.INT8))
        nodes.append(helper.make_node("DequantizeLinear", ["q", "step"], ["dq"], "dq"))
    names = ["dq" if quantized else "x", "weight", *(["bias"] if "bias" in arrays else [])]
    nodes.append(helper.make_node(form.partition(",")[0], names, ["logits"], "layer", **({"transB": 1} if transposed else {})))
    values = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name, size in (("x", INPUTS), ("logits", OUTPUTS))
    )
    initializers = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in arrays.items()]
    made = helper.make_graph(nodes, "layer", [next(values)], [next(values)], initializers)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def answers(model: onnx.ModelProto, options: SessionOptions) -> np.ndarray:
    found: np.ndarray = InferenceSession(model.SerializeToString(), options).run(None, {"x": DRAWN})[0]
    return found.reshape(len(DRAWN), -1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("form", FORMS)
def test_a_session_with_default_settings_answers_as_the_engine(form: str, scheme: str, tmp_path: Path) -> None:
    ours = answers(graph(form, scheme), session_options(properties(1)))
    exact = SessionOptions()
    exact.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    largest = np.abs(ours).max()
    np.testing.assert_allclose(ours, answers(graph(form, scheme), exact), rtol=0, atol=1e-5 * largest)
    changed = as_hidden_states(with_float_activations(graph(form, scheme)))
    onnx.checker.check_model(changed)
    default = SessionOptions()
    default.optimized_model_filepath, default.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    np.testing.assert_allclose(answers(changed, default), ours, rtol=0, atol=1e-5 * largest)
    assert "MatMulNBits" not in {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("form", ["MatMul", "Gemm"])
def test_the_spelling_of_our_own_engine_is_rounded_by_default(form: str, scheme: str) -> None:
    """What the other spelling is for; if ONNX Runtime ceases to do so, the folder no longer needs it."""
    ours, rounded = (answers(graph(form, scheme), options) for options in (session_options(properties(1)), SessionOptions()))
    assert np.abs(rounded - ours).max() > 1e-3 * np.abs(ours).max()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_network_of_openvino_has_its_setting_inside(scheme: str, tmp_path: Path) -> None:
    ours = answers(graph("MatMul", scheme), session_options(properties(1)))
    convert(save(graph("MatMul", scheme), tmp_path / "model.onnx"), tmp_path, {GROUP: "0"})
    write_network(tmp_path / "openvino.xml", tmp_path / "vectors" / "openvino_model.xml")
    network = openvino.Core().compile_model(tmp_path / "vectors" / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    np.testing.assert_allclose(network({"x": DRAWN})[0][:, 0], ours, rtol=0, atol=1e-5 * np.abs(ours).max())


@pytest.mark.parametrize("form", FORMS)
def test_layers_with_quantized_activations_are_left_alone(form: str) -> None:
    before = graph(form, "w8a16", quantized=True).SerializeToString()
    assert with_float_activations(graph(form, "w8a16", quantized=True)).SerializeToString() == before
