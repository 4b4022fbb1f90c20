import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import load_file, save_file
from torch import nn

from export.engines import onnxruntime as ort
from export.engines import openvino
from export.engines.registry import open_engine
from export.engines.spec import EngineSpec
from export.graph.macs import count_macs
from export.graph.onnx import export_float, module_of
from export.graph.qdq import insert_qdq, uint8_activations, weight_codes
from export.parity.parity import compare_layers, quantized_gemms
from foundation.artifacts.graph import Graph
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from tests.export import tiny_checkpoints as tiny

pytestmark = pytest.mark.whole

SCRATCH = tempfile.TemporaryDirectory(prefix="qdq-")  # removed when the test run ends


class NaiveInt8(nn.Module):
    """y = float32(integer product) * (input scale * weight scale) + bias, written out; remembers input and codes."""

    def __init__(self, linear, input_scale, weight_scale, smooth):
        super().__init__()
        self.input_scale, self.weight_scale, self.smooth, self.bias = input_scale, weight_scale, smooth, linear.bias
        self.weight = torch.round(linear.weight * smooth / weight_scale[:, None]).long()

    def forward(self, x):
        self.steps = x / self.smooth / self.input_scale
        self.codes = torch.clamp(torch.round(self.steps), -128, 127).long()
        return (self.codes @ self.weight.T).float() * (self.input_scale * self.weight_scale) + self.bias


def naive_int8(folder, family):
    """Loads a quantized checkpoint with naive integer layers in place."""
    model, scales = tiny.load(folder, family), load_file(folder / "quantization.safetensors")
    for name in json.loads((folder / "quantization.json").read_text())["layers"]:
        parent, _, child = name.rpartition(".")
        smooth = scales.get(f"{name}.input_smooth", torch.tensor(1.0))
        layer = NaiveInt8(model.get_submodule(name), scales[f"{name}.input_scale"], scales[f"{name}.weight_scale"], smooth)
        setattr(model.get_submodule(parent), child, layer)
    return model


def input_scales(folder, family, fraction=0.7):
    """Returns a scale for every linear that covers most, not all, of the range of its inputs: some codes saturate."""
    model, scales = tiny.load(folder, family), {}
    linears = tiny.linears(model)
    for name, module in linears.items():
        module.register_forward_pre_hook(lambda _, args, name=name: scales.update({name: float(args[0].abs().max()) * fraction / 127}))
    with torch.no_grad():
        model(**torch_features(family, 4, 24, seed=1))
    return {name: scales[name] for name in linears}


def torch_features(family, batch, length, seed):
    return {name: torch.from_numpy(value) for name, value in tiny.features(family, batch, length, seed).items()}


@cache
def made(family):
    """Quantizes and exports each family once: (checkpoint, float ONNX, Q/DQ ONNX)."""
    source = Path(SCRATCH.name) / family
    tiny.write(source, family)
    folder = tiny.quantize(source, family, input_scales(source, family), source.with_suffix(".int8"))
    float_path = export_float(Checkpoint(folder), tiny.preprocessor(family), folder / "float.onnx")
    return folder, float_path, insert_qdq(Graph(float_path), Checkpoint(folder), folder / "int8.onnx")


@cache
def made_smooth(family):
    """As `made`, but everything in the blocks but the last layer has a smoothing vector: of each tensor one, named after its readers."""
    source = Path(SCRATCH.name) / f"{family}-smooth"
    tiny.write(source, family)
    model, readers, scales = tiny.load(source, family), {}, {}
    linears = {name: module for name, module in tiny.linears(model).items() if "layer" in name}
    for name, module in linears.items():
        module.register_forward_pre_hook(lambda _, args, name=name: readers.setdefault(args[0].data_ptr(), (args[0], []))[1].append(name))
    with torch.no_grad():
        model(**torch_features(family, 4, 24, seed=1))
    generator, tensors = torch.Generator().manual_seed(0), list(readers.values())
    folder = source.with_suffix(".int8")
    for x, names in tensors[:-1]:
        smooth = torch.exp(torch.randn(x.shape[-1], generator=generator))
        for name in names:
            linears[name].weight.data *= smooth
            scales[name] = (float((x / smooth).abs().max()) * 0.7 / 127, smooth)
    scales |= {name: (float(tensors[-1][0].abs().max()) * 0.7 / 127, None) for name in tensors[-1][1]}
    model.save_pretrained(source.with_suffix(".scaled"))
    tiny.quantize(source.with_suffix(".scaled"), family, {name: scale for name, (scale, _) in scales.items()}, folder)
    saved, grid = load_file(folder / "quantization.safetensors"), tiny.load(folder, family)
    for name, (_, smooth) in scales.items():
        if smooth is not None:
            grid.get_submodule(name).weight.data /= smooth
            saved[f"{name}.input_smooth"] = smooth.clone()
    grid.save_pretrained(folder)
    save_file(saved, folder / "quantization.safetensors")
    weights = {name: module.weight.detach().numpy() for name, module in tiny.linears(grid).items()}
    float_path = tiny.with_weights(made(family)[1], weights, folder / "float.onnx")
    return folder, float_path, insert_qdq(Graph(float_path), Checkpoint(folder), folder / "int8.onnx")


def run(model, features, extra=()):
    """Runs without any graph optimization; returns the logits and the tensors named in `extra`."""
    probed = onnx.ModelProto()
    probed.CopyFrom(model)
    for name in extra:
        probed.graph.output.append(helper.make_empty_tensor_value_info(name))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(probed.SerializeToString(), options).run(["logits", *extra], features)


def codes_of(model):
    """Returns, by module path, the name of the tensor of input codes of every quantized layer."""
    producer = {output: node for node in model.graph.node for output in node.output}
    layers = {}
    for node in model.graph.node:
        source = producer.get(node.input[0])
        if module_of(node) and source is not None and source.op_type == "DequantizeLinear":
            layers[module_of(node)] = source.input[0]
    return layers


@pytest.mark.parametrize(
    ("family", "make"), [("bert", made), ("distilbert", made), ("vit", made), ("bert", made_smooth), ("vit", made_smooth)]
)
def test_codes_of_every_layer_equal_the_integer_model(family, make):
    folder, _, path = make(family)
    reference, model = naive_int8(folder, family), onnx.load(path)
    layers = codes_of(model)
    assert set(layers) == set(json.loads((folder / "quantization.json").read_text())["layers"])
    for batch, length in ((1, 7), (4, 24)):
        features = tiny.features(family, batch, length, seed=2)
        with torch.no_grad():
            expected = reference(**{name: torch.from_numpy(value) for name, value in features.items()}).logits.numpy()
        logits, *codes = run(model, features, list(layers.values()))
        saturated = 0
        for name, found in zip(layers, codes, strict=True):
            layer = reference.get_submodule(name)
            steps, wanted = layer.steps.numpy(), layer.codes.numpy()
            if found.ndim == wanted.ndim:  # of the last layer, what the head reads
                steps, wanted = steps[:, : found.shape[1]], wanted[:, : found.shape[1]]
            assert found.dtype == np.int8
            different = found.reshape(wanted.shape) != wanted
            boundary = np.abs(np.abs(steps - np.floor(steps)) - 0.5) < 1e-3
            assert not (different & ~boundary).any(), name
            saturated += (np.abs(steps) > 128).sum()
        assert saturated > 0
        np.testing.assert_allclose(logits, expected, atol=2e-3 if not different.any() else 0.1)


@pytest.mark.parametrize("make", [made, made_smooth])
@pytest.mark.parametrize("family", ["bert", "vit"])
def test_equals_the_checkpoint_in_torch(family, make):
    folder, _, path = make(family)
    with torch.no_grad():
        expected = forward(load(folder), torch_features(family, 4, 24, seed=2)).numpy()
    (logits,) = run(onnx.load(path), tiny.features(family, 4, 24, seed=2))
    np.testing.assert_allclose(logits, expected, atol=2e-3)


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_weights_are_stored_as_int8_only(family):
    folder, _, path = made(family)
    graph = onnx.load(path).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    model, scales = tiny.load(folder, family), load_file(folder / "quantization.safetensors")
    weights = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in tensors]
    layers = json.loads((folder / "quantization.json").read_text())["layers"]
    assert len(weights) == len(layers)
    for node in weights:
        name = node.name.removesuffix(".weight/DequantizeLinear")
        codes, scale, zero = (numpy_helper.to_array(tensors[tensor]) for tensor in node.input)
        axis = next(attribute.i for attribute in node.attribute if attribute.name == "axis")
        assert (codes.dtype, zero.dtype, zero.any()) == (np.int8, np.int8, False)
        np.testing.assert_array_equal(scale, scales[f"{name}.weight_scale"].numpy())
        restored = codes.astype(np.float32) * np.expand_dims(scale, 1 - axis)
        np.testing.assert_array_equal(restored if axis == 0 else restored.T, model.get_submodule(name).weight.detach().numpy())
        assert f"{name}.weight" not in tensors
    assert {axis.i for node in weights for axis in node.attribute} == ({0, 1})  # Gemm and MatMul keep their weights differently


def test_layers_that_read_one_tensor_share_its_codes():
    codes = codes_of(onnx.load(made("bert")[2]))
    for layer, parts in ((0, ("query", "key", "value")), (1, ("key", "value"))):  # the last query is that of the first token
        prefix = f"bert.encoder.layer.{layer}.attention.self"
        assert len({codes[f"{prefix}.{part}"] for part in parts}) == 1
    assert len(set(codes.values())) == len(codes) - 3


def test_different_scales_for_one_tensor_are_kept_apart(tmp_path):
    folder, float_path, _ = made("bert")
    names = [f"bert.encoder.layer.0.attention.self.{part}" for part in ("query", "key", "value")]
    tensors = tmp_path / "checkpoint"
    tensors.mkdir()
    saved = load_file(folder / "quantization.safetensors")
    saved[f"{names[1]}.input_scale"] = saved[f"{names[1]}.input_scale"] * 2
    save_file(saved, tensors / "quantization.safetensors")
    (tensors / "quantization.json").write_text(json.dumps({"layers": {name: {} for name in names}}))
    model = onnx.load(insert_qdq(Graph(float_path), Checkpoint(tensors), tmp_path / "int8.onnx"))
    codes = codes_of(model)
    assert codes[names[0]] == codes[names[2]] != codes[names[1]]
    _, fine, coarse = run(model, tiny.features("bert", 2, 9), [codes[names[0]], codes[names[1]]])
    fine, coarse = fine.astype(int), coarse.astype(int)
    assert np.abs(coarse * 2 - fine)[np.abs(fine) < 127].max() <= 1


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_a_smoothed_tensor_is_multiplied_once_by_the_reciprocal(family):
    folder, _, path = made_smooth(family)
    graph, saved = onnx.load(path).graph, load_file(folder / "quantization.safetensors")
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    producer, codes = {output: node for node in graph.node for output in node.output}, codes_of(onnx.load(path))
    for name, tensor in codes.items():
        source = producer[producer[tensor].input[0]]
        if f"{name}.input_smooth" in saved:
            assert source.op_type == "Mul"
            np.testing.assert_array_equal(tensors[source.input[1]], np.float32(1) / saved[f"{name}.input_smooth"].numpy())
        else:
            assert "smoothed" not in source.name
    multiplications = [node for node in graph.node if node.name.endswith(".smoothed/Mul")]
    assert len(multiplications) == len(set(codes.values())) - 1  # query, key and value share one


@pytest.mark.parametrize(("name", "mode"), [("openvino", "static"), ("openvino", "dynamic"), ("onnxruntime", "dynamic")])
def test_engines_run_smoothed_layers_in_exact_integers(name, mode, tmp_path):
    path = made_smooth("bert")[2]
    built = openvino.convert(path, tmp_path)[0] if name == "openvino" else ort.with_uint8_activations(path, tmp_path)
    engine = open_engine(EngineSpec(name, mode, "int8", "fp32", "cpu", 1, str(built), str(tmp_path), (1, 4)))
    gemms = quantized_gemms(Graph(path))
    compared = compare_layers(
        gemms, engine.probe([tensor for gemm in gemms for tensor in gemm.tensors], tiny.features("bert", 4, 24, seed=2))
    )
    assert len(compared) == 12
    assert all(found.passed and found.codes > 0 for found in compared), compared
    counted = count_macs(Graph(path), 4, 24)
    precisions = engine.precisions([gemm.node for gemm in counted], 4, 24)
    assert {gemm.name for gemm in counted if precisions[gemm.node] == "int8"} == {gemm.layer for gemm in gemms}


def test_smoothed_and_plain_readers_of_one_tensor_are_kept_apart(tmp_path):
    folder, float_path, _ = made("bert")
    names = [f"bert.encoder.layer.0.attention.self.{part}" for part in ("query", "key", "value")]
    other = tmp_path / "checkpoint"
    other.mkdir()
    saved = load_file(folder / "quantization.safetensors")
    for name in names[:2]:
        saved[f"{name}.input_smooth"] = torch.full((16,), 2.0)
        saved[f"{name}.weight_scale"] *= 2
    save_file(saved, other / "quantization.safetensors")
    (other / "quantization.json").write_text(json.dumps({"layers": {name: {} for name in names}}))
    model = onnx.load(insert_qdq(Graph(float_path), Checkpoint(other), tmp_path / "int8.onnx"))
    onnx.checker.check_model(model)
    codes = codes_of(model)
    assert codes[names[0]] == codes[names[1]] != codes[names[2]]
    halved, whole = run(model, tiny.features("bert", 2, 9), [codes[names[0]], codes[names[2]]])[1:]
    assert np.abs(halved.astype(int) * 2 - whole)[np.abs(whole.astype(int)) < 127].max() <= 1


def test_products_of_attention_stay_float():
    graph = onnx.load(made("bert")[2]).graph
    dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    products = [node for node in graph.node if node.name.endswith(("/qk", "/pv"))]
    assert len(products) == 4
    assert not any(name in dequantized for node in products for name in node.input)


@pytest.mark.parametrize("make", [made, made_smooth])
@pytest.mark.parametrize("family", ["bert", "vit"])
def test_uint8_activations_are_the_same_integers(family, make):
    signed = onnx.load(make(family)[2])
    unsigned = uint8_activations(signed)
    onnx.checker.check_model(unsigned)
    assert signed == onnx.load(make(family)[2])  # not touched
    names, features = sorted(set(codes_of(signed).values())), tiny.features(family, 3, 20, seed=3)
    expected, *codes = run(signed, features, names)
    logits, *shifted = run(unsigned, features, names)
    for one, other in zip(codes, shifted, strict=True):
        assert other.dtype == np.uint8
        np.testing.assert_array_equal(one.astype(int) + 128, other)
    np.testing.assert_array_equal(logits, expected)


def test_same_bytes_twice(tmp_path):
    folder, float_path, path = made("bert")
    assert insert_qdq(Graph(float_path), Checkpoint(folder), tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def test_a_layer_that_is_not_in_the_graph_is_named(tmp_path):
    folder, float_path, _ = made("bert")
    other = tmp_path / "checkpoint"
    other.mkdir()
    saved = load_file(folder / "quantization.safetensors")
    saved |= {"bert.no.such.layer.input_scale": torch.tensor(1.0), "bert.no.such.layer.weight_scale": torch.ones(2)}
    save_file(saved, other / "quantization.safetensors")
    (other / "quantization.json").write_text(json.dumps({"layers": {"classifier": {}, "bert.no.such.layer": {}}}))
    with pytest.raises(ValueError, match=r"needs a GEMM in the graph: bert\.no\.such\.layer has none$"):
        insert_qdq(Graph(float_path), Checkpoint(other), tmp_path / "int8.onnx")


def test_a_layer_that_runs_twice_has_one_weight(tmp_path):
    folder, _ = tiny.exported("albert")
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"
    quantized = tiny.quantize(folder, "albert", {name: 0.02}, tmp_path / "checkpoint")
    path = export_float(Checkpoint(quantized), tiny.preprocessor("albert"), tmp_path / "float.onnx")
    graph = onnx.load(str(insert_qdq(Graph(path), Checkpoint(quantized), tmp_path / "int8.onnx"))).graph
    readers = [node for node in graph.node if f"{name}.weight.dequantized" in node.input]
    assert len(readers) == 2
    assert len({node.input[0] for node in readers}) == 2
    assert [tensor.name for tensor in graph.initializer].count(f"{name}.weight.codes") == 1


def test_weights_off_the_grid_are_refused():
    scale = np.array([0.5, 0.25], np.float32)
    weight = np.array([[0.5, -1.0, 63.5], [0.25, 0.0, -31.75]], np.float32)
    np.testing.assert_array_equal(weight_codes("layer", weight, scale, 0), [[1, -2, 127], [1, 0, -127]])
    np.testing.assert_array_equal(weight_codes("layer", weight.T, scale, 1), [[1, 1], [-2, 0], [127, -127]])
    for wrong in (weight + 0.1, weight * 2, np.full_like(weight, np.nan)):
        with pytest.raises(ValueError, match="layer: weights of the float graph are not scale"):
            weight_codes("layer", wrong, scale, 0)
    with pytest.raises(ValueError, match=r"layer: \(2,\) weight scales .* 3 output channels"):
        weight_codes("layer", weight, scale, 1)
