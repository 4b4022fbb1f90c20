"""Convolutions in the Q/DQ graph and in ONNX Runtime's integer form, against the int8 layer of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from export.engines import onnxruntime as ort
from export.engines import openvino
from export.engines.spec import EngineSpec
from export.graph.onnx import MODULE
from export.graph.qdq import insert_qdq
from export.parity.parity import compare_layer, quantized_gemms
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import levels, weight_scale
from foundation.schemes.int8_convolution import ConvolutionScales, Geometry

OPEN: dict[str, Callable[[EngineSpec], openvino.OpenVino | ort.OnnxRuntime]] = {
    "openvino": openvino.OpenVino,
    "onnxruntime": ort.OnnxRuntime,
}
SCALE = 0.03
LAYERS: dict[str, Callable[[], nn.Conv1d | nn.Conv2d]] = {
    "padded": lambda: nn.Conv2d(4, 6, 3, 2, 1),
    "one position": lambda: nn.Conv2d(4, 8, 1, bias=False),
    "groups": lambda: nn.Conv2d(4, 6, (3, 2), (1, 2), (2, 1), (2, 1), 2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, 1, 1, groups=4),
    "one axis": lambda: nn.Conv1d(4, 6, 3, 1, 1),
}


def made(folder: Path, layer: nn.Conv1d | nn.Conv2d) -> tuple[Path, ConvolutionScales, Tensor]:
    """Writes a float graph of a convolution and a residual addition, its checkpoint, and the Q/DQ graph; returns that, scales and input."""
    torch.manual_seed(0)
    for value in layer.parameters():
        nn.init.normal_(value)
    layer.requires_grad_(False)
    scales = ConvolutionScales(weight_scale(layer.weight.flatten(1), levels(7)), torch.tensor(SCALE), 7)
    layer.weight.data = scales.on_grid(layer.weight)
    geometry, axes = Geometry.of(layer), len(layer.kernel_size)
    x = torch.randn(2, 4, *(7, 6)[:axes])
    inputs = {"body.conv.weight": layer.weight} | ({} if layer.bias is None else {"body.conv.bias": layer.bias})
    attributes = {"strides": geometry.stride, "dilations": geometry.dilation, "group": geometry.groups, "kernel_shape": layer.kernel_size}
    attributes["pads"] = [before for before, _ in geometry.padding] + [after for _, after in geometry.padding]
    conv = helper.make_node("Conv", ["pixel_values", *inputs], ["y"], "body.conv/Conv", **attributes)
    helper.set_metadata_props(conv, {MODULE: "body.conv"})
    shape = list(layer(x).shape)
    graph = helper.make_graph(
        [conv, helper.make_node("Relu", ["y"], ["logits"], "relu")],
        "model",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", *x.shape[1:]])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", *shape[1:]])],
        [numpy_helper.from_array(value.numpy(), name) for name, value in inputs.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save_model(model, str(folder / "float.onnx"))
    save_quantization(folder, {"body.conv": scales}, {})
    return insert_qdq(Graph(folder / "float.onnx"), Checkpoint(folder), folder / "model.onnx"), scales, x


@pytest.mark.parametrize("engine", OPEN)
@pytest.mark.parametrize("name", LAYERS)
def test_an_engine_computes_what_torch_computes(engine: str, name: str, tmp_path: Path) -> None:
    layer = LAYERS[name]()
    path, scales, x = made(tmp_path, layer)
    file = openvino.convert(path, tmp_path)[0] if engine == "openvino" else ort.with_uint8_activations(path, tmp_path)
    opened = OPEN[engine](EngineSpec(engine, "dynamic", "int8", "fp32", "cpu", 1, str(file), str(tmp_path)))
    features = {"pixel_values": x.numpy()}
    expected = scales.module("body.conv", layer)(x).relu()
    np.testing.assert_allclose(opened.predict(features), expected.numpy(), rtol=1e-6, atol=1e-6)
    assert opened.precisions(["body.conv/Conv"], 2, None) == {"body.conv/Conv": "int8"}
    (gemm,) = quantized_gemms(Graph(path))
    tensors = opened.probe(gemm.tensors, features)
    parity = compare_layer(gemm, *(tensors[tensor] for tensor in gemm.tensors))
    assert (parity.passed, parity.codes, parity.sums) == (True, x.numel(), expected.numel())
    wrong = tensors[gemm.output].copy()
    wrong.flat[0] += SCALE * float(scales.weight_scale[0])  # one more in one sum
    assert compare_layer(gemm, tensors[gemm.input], tensors[gemm.codes], wrong).wrong_sums == 1


def test_scales_lie_along_the_outputs_and_integers_are_stored(tmp_path: Path) -> None:
    layer = LAYERS["groups"]()
    path, scales, _ = made(tmp_path, layer)
    graph = onnx.load(str(path)).graph
    assert Counter(node.op_type for node in graph.node) == {"QuantizeLinear": 1, "DequantizeLinear": 2, "Conv": 1, "Relu": 1}
    (weight,) = (node for node in graph.node if node.output[0] == "body.conv.weight.dequantized")
    assert {attribute.name: attribute.i for attribute in weight.attribute} == {"axis": 0}
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert np.array_equal(stored["body.conv.weight.codes"], scales.codes(layer.weight).numpy())
    assert np.array_equal(stored["body.conv.weight.scale"], scales.weight_scale.numpy())
    integer = onnx.load(str(ort.with_uint8_activations(path, tmp_path))).graph
    assert [node.op_type for node in integer.node] == ["QuantizeLinear", "ConvInteger", "Cast", "Mul", "Add", "Relu"]
    assert integer.node[1].name == "body.conv/Conv"


def test_a_convolution_without_a_bias_gets_one_that_changes_nothing(tmp_path: Path) -> None:
    path, _, _ = made(tmp_path, LAYERS["one position"]())
    (conv,) = (node for node in onnx.load(str(path)).graph.node if node.op_type == "Conv")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}
    assert np.array_equal(stored[conv.input[2]], np.full(8, 2.0**-126, np.float32))


def test_weights_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    made(tmp_path, LAYERS["padded"]())
    model = onnx.load(str(tmp_path / "float.onnx"))
    weight = numpy_helper.to_array(model.graph.initializer[0]) * np.float32(1.01)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "body.conv.weight"))
    onnx.save_model(model, str(tmp_path / "other.onnx"))
    with pytest.raises(ValueError, match=r"body\.conv: .* float graph are not scale \* integer"):
        insert_qdq(Graph(tmp_path / "other.onnx"), Checkpoint(tmp_path), tmp_path / "model.onnx")
