"""The graphs of the other schemes: what they hold, what they compute, and what the engines make of them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

from export.graph.macs import count_macs
from export.graph.onnx import module_of
from export.graph.qdq_schemes import group_size, has_zero_points, insert_dynamic, insert_fp8, insert_weights, uneven
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.schemes.checkpoint import apply_quantization, load_quantization, save_quantization
from foundation.schemes.fp8 import Fp8Scales
from foundation.schemes.int4 import Int4Scales, group_range, group_scale
from foundation.schemes.int8 import DynamicScales, has_vnni, weight_scale
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.scales import Scales
from tests.export import tiny_checkpoints as tiny

pytestmark = pytest.mark.whole

SCRATCH = tempfile.TemporaryDirectory(prefix="qdq-schemes-")
FAMILIES = ("bert", "vit")
ZERO_POINTS = "w4a16, zero points"
SCHEMES = ("w8a8-dynamic", "w8a16", "w4a16", ZERO_POINTS, "fp8")
WRITERS = {**dict.fromkeys(SCHEMES, insert_weights), "fp8": insert_fp8}


def scales_of(scheme: str, weight: torch.Tensor, largest: float, smooth: torch.Tensor | None) -> Scales:
    match scheme:
        case "w8a8-dynamic":
            return DynamicScales(weight_scale(weight * (1 if smooth is None else smooth), 63), 7, smooth)
        case "w8a16":
            return WeightScales(0.9 * weight_scale(weight, 127))
        case "w4a16":
            return Int4Scales(0.9 * group_scale(weight, 8), 8)
        case "w4a16, zero points":
            scale, zero_point = group_range(weight, 8)[:2]
            return Int4Scales(0.9 * scale, 8, zero_point)
    return Fp8Scales(weight_scale(weight, 448), torch.tensor(0.8 * largest / 448))


@cache
def made(family: str, scheme: str, smooth: bool = False) -> tuple[Path, Path, Path]:
    """Quantizes and exports each family once: (checkpoint, float ONNX, ONNX of the scheme)."""
    source, exported = tiny.exported(family)
    folder = Path(SCRATCH.name) / f"{family}-{scheme}-{smooth}"
    model, ranges = tiny.load(source, family), {}
    layers = {name: layer for name, layer in tiny.linears(model).items() if "layer" in name}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, args, name=name: ranges.update({name: float(args[0].abs().max())}))
    with torch.no_grad():
        model(**torch_features(family, 4, 24))
    scales = {}
    for name, layer in layers.items():
        vector = torch.linspace(0.5, 2, layer.in_features) if smooth else None
        scales[name] = scales_of(scheme, layer.weight.detach(), ranges[name], vector)
        layer.weight.data = scales[name].on_grid(layer.weight.detach())
    model.save_pretrained(folder)
    save_quantization(folder, scales, {})
    floating = tiny.with_weights(exported, {name: layers[name].weight.detach().numpy() for name in scales}, folder / "float.onnx")
    return folder, floating, WRITERS[scheme](Graph(floating), Checkpoint(folder), folder / "model.onnx")


def torch_features(family: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in tiny.features(family, batch, length, seed=1).items()}


def in_torch(folder: Path, family: str) -> np.ndarray:
    model = tiny.load(folder, family)
    apply_quantization(model, folder)
    with torch.no_grad():
        return forward(model, torch_features(family, 4, 24)).numpy()


def in_onnxruntime(path: Path, family: str, accuracy_level: str = "1", optimized: bool = True) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", accuracy_level)
    session = onnxruntime.InferenceSession(str(path), options)
    return session.run(["logits"], tiny.features(family, 4, 24, seed=1))[0]


def in_openvino(path: Path, family: str, group: int) -> np.ndarray:
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group), "INFERENCE_NUM_THREADS": "1"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    return compiled(tiny.features(family, 4, 24, seed=1))["logits"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_codes_are_those_of_torch(family: str, scheme: str) -> None:
    folder, _, path = made(family, scheme)
    model, graph = tiny.load(folder, family), onnx.load(str(path)).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    int8 = dict.fromkeys(("w8a8-dynamic", "w8a16"), TensorProto.INT8)
    kind = {**int8, "w4a16": TensorProto.INT4, ZERO_POINTS: TensorProto.UINT4, "fp8": TensorProto.FLOAT8E4M3FN}
    for name, scales in load_quantization(folder)[0].items():
        linear = model.get_submodule(name)
        layer = scales.module(name, linear)
        held = layer.weight.view(torch.float8_e4m3fn) if scheme == "fp8" else layer.weight
        codes = layer.codes() + 8 * (scheme == ZERO_POINTS) if scheme.startswith("w4a16") else held
        stored = constants[f"{name}.weight.codes"]
        assert stored.data_type == kind[scheme]
        found = numpy_helper.to_array(stored).astype(np.float32)
        gemm = next(node for node in graph.node if module_of(node) == name and node.op_type in ("MatMul", "Gemm"))
        transposed = any(attribute.name == "transB" and attribute.i for attribute in gemm.attribute)
        assert np.array_equal(found if transposed else found.T, codes.float().numpy())
        weight = next(node for node in graph.node if node.output[0] == gemm.input[1])
        assert weight.op_type == "DequantizeLinear"
        if isinstance(scales, Int4Scales):
            assert (len(weight.input) == 3) == (scheme == ZERO_POINTS) == has_zero_points(Graph(path))
            shifted = torch.zeros(scales.weight_scale.shape) if scales.weight_zero_point is None else scales.weight_zero_point + 8.0
            zeros = [numpy_helper.to_array(constants[tensor]).astype(np.float32) for tensor in weight.input[2:]]
            assert all(np.array_equal(zero if transposed else zero.T, shifted.numpy()) for zero in zeros)
        assert f"{name}.weight" not in constants


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_onnxruntime_answers_like_torch(family: str, scheme: str, smooth: bool, tmp_path: Path) -> None:
    if smooth and scheme != "w8a8-dynamic":
        return
    folder, floating, path = made(family, scheme, smooth)
    path = insert_dynamic(Graph(floating), Checkpoint(folder), tmp_path / "dynamic.onnx") if scheme == "w8a8-dynamic" else path
    # with its optimizations ONNX Runtime makes a product of integers of the FP8 one, and then refuses the graph
    expected, found = in_torch(folder, family), in_onnxruntime(path, family, optimized=scheme != "fp8")
    rounded = np.abs(in_onnxruntime(floating, family) - expected).mean()  # what rounding the activations changes
    assert np.abs(found - expected).mean() <= (1e-5 if scheme.endswith("a16") or scheme == ZERO_POINTS else 0.2 * rounded)


def test_the_layers_of_a_dynamic_graph_multiply_integers_and_keep_their_names(tmp_path: Path) -> None:
    folder, floating, weights = made("bert", "w8a8-dynamic", True)
    graph = onnx.load(str(insert_dynamic(Graph(floating), Checkpoint(folder), tmp_path / "dynamic.onnx"))).graph
    integer = {module_of(node): node.name for node in graph.node if node.op_type == "MatMulInteger"}
    assert integer.keys() == load_quantization(folder)[0].keys()
    names = {module_of(node): node.name for node in onnx.load(str(floating)).graph.node if node.op_type in ("MatMul", "Gemm")}
    assert all(names[name] == node for name, node in integer.items())
    assert (
        sum(node.op_type == "ReduceMax" for node in graph.node) == 2 * 4 + 1
    )  # query, key and value read one tensor; the last query is that of the first token
    for other in (weights, made("bert", "fp8")[2], made("bert", "w4a16")[2], made("bert", ZERO_POINTS)[2]):
        assert count_macs(Graph(other), 2, 8) == count_macs(Graph(floating), 2, 8)


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16", ZERO_POINTS])
def test_openvino_multiplies_what_it_is_told_to(scheme: str) -> None:
    folder, _, path = made("bert", scheme)
    expected = in_torch(folder, "bert")
    if scheme.startswith("w4a16"):
        assert np.abs(in_openvino(path, "bert", 0) - expected).max() < 1e-4
        return
    floating = in_openvino(path, "bert", 0)
    rounded = np.abs(floating - expected).mean()
    assert rounded > 1e-3
    assert np.abs(in_openvino(path, "bert", 4096) - floating).max() < 1e-4  # wider than any layer: float


@pytest.mark.skipif(not has_vnni(), reason="without VNNI OpenVINO leaves activations in float")
@pytest.mark.parametrize("group", [16, 64])
def test_groups_of_openvino_are_those_of_the_formula(group: int, tmp_path: Path) -> None:
    linear, x = nn.Linear(64, 48, bias=False), torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    scale = weight_scale(linear.weight.detach(), 63)
    codes = torch.round(linear.weight.detach() / scale[:, None])
    weight = onnx.helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], axis=1)
    product = onnx.helper.make_node("MatMul", ["x", "w"], ["logits"])
    values = [onnx.helper.make_tensor_value_info(name, 1, ["b", "s", size]) for name, size in (("x", 64), ("logits", 48))]
    constants = [numpy_helper.from_array(codes.T.numpy().astype(np.int8), "codes"), numpy_helper.from_array(scale.numpy(), "scale")]
    model = onnx.helper.make_model(onnx.helper.make_graph([weight, product], "g", values[:1], values[1:], constants))
    model.opset_import[0].version = 20
    onnx.save(model, tmp_path / "m.onnx")
    expected = torch.zeros(2, 9, 48)
    for part in range(0, 64, group):
        inputs = x[..., part : part + group]
        step = inputs.abs().amax(-1, keepdim=True) / 127
        expected += (torch.round(inputs / step) @ codes[:, part : part + group].T) * step * scale
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group)}
    found = openvino.Core().compile_model(str(tmp_path / "m.onnx"), "CPU", settings)({"x": x.numpy()})["logits"]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_group_is_what_all_widths_share(tmp_path: Path) -> None:
    assert group_size(Graph(made("bert", "w8a8-dynamic")[2])) == 32  # 16 and 24 share 8, which is too small
    model = onnx.load(str(made("vit", "w8a8-dynamic")[2]))
    del model.graph.node[:]
    for number, width in enumerate((96, 144)):
        model.graph.node.append(onnx.helper.make_node("DequantizeLinear", [f"{number}", "s"], [f"{number}.w"], axis=1))
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((width, 3), np.int8), f"{number}"))
    onnx.save(model, str(tmp_path / "wide.onnx"))
    assert group_size(Graph(tmp_path / "wide.onnx")) == 48


@pytest.mark.parametrize("scheme", ["w4a16", ZERO_POINTS])
def test_a_layer_with_a_shorter_last_group_is_named(scheme: str, tmp_path: Path) -> None:
    folder, floating, even = made("bert", scheme)
    assert uneven(Graph(even)) is None
    layers, _ = load_quantization(folder)
    model = tiny.load(folder, "bert")
    for name in layers:
        linear = model.get_submodule(name)
        scale, zero_point = group_range(linear.weight.detach(), 16)[:2]
        layers[name] = Int4Scales(group_scale(linear.weight.detach(), 16), 16) if scheme == "w4a16" else Int4Scales(scale, 16, zero_point)
        linear.weight.data = layers[name].on_grid(linear.weight.detach())
    model.save_pretrained(tmp_path)
    save_quantization(tmp_path, layers, {})
    weights = {name: model.get_submodule(name).weight.detach().numpy() for name in layers}
    floating = tiny.with_weights(floating, weights, tmp_path / "float.onnx")
    path = insert_weights(Graph(floating), Checkpoint(tmp_path), tmp_path / "model.onnx")
    assert str(uneven(Graph(path))).endswith("output.dense has 24 inputs, no multiple of group_size 16")
    assert np.abs(in_onnxruntime(path, "bert") - in_torch(tmp_path, "bert")).max() < 1e-4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_graph_of_other_weights_is_refused(scheme: str, tmp_path: Path) -> None:
    folder, floating, _ = made("bert", scheme)
    model = onnx.load(str(floating))
    name = next(iter(load_quantization(folder)[0]))
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == f"{name}.weight")
    tensor.CopyFrom(numpy_helper.from_array(1.01 * numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(ValueError, match=f"{name}: weights of the float graph are not on the grid"):
        WRITERS[scheme](Graph(tmp_path / "other.onnx"), Checkpoint(folder), tmp_path / "out.onnx")
