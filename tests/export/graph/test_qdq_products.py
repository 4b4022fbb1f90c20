"""Q/DQ on attention and residuals: the graph against torch, and what engines make of it."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from onnx import helper, numpy_helper
from torch import nn

from export.engines import onnxruntime as ort
from export.engines import openvino
from export.engines.registry import open_engine
from export.engines.spec import EngineSpec
from export.graph.macs import count_macs
from export.graph.onnx import export_float
from export.graph.qdq import insert_qdq
from export.parity import products
from export.parity.parity import quantized_gemms
from export.parity.products import compare_sites, quantized_sites
from export.share import share
from foundation.artifacts.graph import Graph
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.schemes.attention_products import PROBABILITY_SCALE, ProductScales, attend, attention_modules
from foundation.schemes.int8 import has_vnni
from foundation.schemes.sites import Sites, load_sites, placed, save_sites
from tests.export import tiny_checkpoints as tiny
from tests.seldom import seldom

pytestmark = pytest.mark.whole

SCRATCH = tempfile.TemporaryDirectory(prefix="qdq-products-")  # removed when the test run ends
ENGINES = [("openvino", "static"), ("openvino", "dynamic"), ("onnxruntime", "dynamic")]
FAMILIES = seldom(["bert", "vit", "distilbert", "llama"], ["distilbert"])  # whose blocks are those of BERT
NEEDS_VNNI = pytest.mark.skipif(not has_vnni(), reason="without VNNI the products of two activations of 8 bits saturate at 16 bits")
LLAMA = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
LLAMA |= {
    "num_labels": 3,
    "vocab_size": 60,
    "max_position_embeddings": tiny.LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def grouped_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds a Llama, whose queries share keys and values, to the families."""
    monkeypatch.setitem(tiny.CONFIGS, "llama", lambda: transformers.LlamaConfig(**LLAMA))


class Largest(nn.Module):
    """Remembers the largest |x| of every tensor of an attention or of a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, float] = {}

    def note(self, name: str, x: torch.Tensor) -> None:
        self.largest[name] = max(self.largest.get(name, 0.0), float(x.abs().max()))

    def forward(self, *given: Any) -> torch.Tensor:
        if len(given) == 1:
            self.note("residual", given[0])
            return given[0]
        return attend(*given, self.multiply)

    def multiply(self, kind: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.note(f"{kind}_left", a)
        self.note(f"{kind}_right", b)
        return a @ b.mT


def observed(model: nn.Module, layers: list[str], features: dict[str, torch.Tensor], fraction: float = 0.8) -> Sites:
    """Returns sites whose scales cover most, not all, of what was seen: some codes saturate."""
    attention, residuals = {name: Largest() for name in attention_modules(model)}, {name: Largest() for name in layers}
    with torch.inference_mode(), placed(model, dict(attention), dict(residuals)):
        model(**features)

    def scale(child: Largest, tensor: str) -> torch.Tensor:
        return torch.tensor(fraction * child.largest[tensor] / 127)

    products = {}
    for name, child in attention.items():
        products[f"{name}/qk"] = ProductScales(scale(child, "qk_left"), scale(child, "qk_right"))
        products[f"{name}/pv"] = ProductScales(torch.tensor(PROBABILITY_SCALE), scale(child, "pv_right"))
    return Sites(products, {f"{name}/residual": scale(child, "residual") for name, child in residuals.items() if child.largest})


def features(family: str, seed: int) -> dict[str, np.ndarray]:
    return tiny.features(family, 4, 24, seed)


def as_tensors(given: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in given.items()}


@functools.cache
def made(family: str) -> tuple[Path, Path, Path]:
    """Quantizes a family with all its sites and exports it, once: (checkpoint, float ONNX, Q/DQ ONNX)."""
    source = Path(SCRATCH.name) / family
    tiny.write(source, family)
    model, inputs, rows = tiny.load(source, family), {}, as_tensors(features(family, 1))
    layers = {name: layer for name, layer in tiny.linears(model).items() if "layer" in name}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: 0.7 * float(args[0].abs().max()) / 127}))
    with torch.inference_mode():
        model(**rows)
    folder = tiny.quantize(source, family, {name: inputs[name] for name in layers}, source.with_suffix(".int8"))
    save_sites(folder, observed(tiny.load(folder, family), list(layers), rows))
    float_path = export_float(Checkpoint(folder), tiny.preprocessor(family), folder / "float.onnx")
    return folder, float_path, insert_qdq(Graph(float_path), Checkpoint(folder), folder / "int8.onnx")


def variant(family: str, names: list[str], folder: Path) -> Path:
    """Returns the Q/DQ graph of a family with only some of its sites."""
    checkpoint, float_path, _ = made(family)
    for name in ("quantization.json", "quantization.safetensors"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    save_sites(folder, load_sites(checkpoint).only(names))
    return insert_qdq(Graph(float_path), Checkpoint(folder), folder / "int8.onnx")


@functools.cache
def built(family: str) -> dict[str, Path]:
    path = made(family)[2]
    return {"openvino": openvino.convert(path, path.parent)[0], "onnxruntime": ort.with_uint8_activations(path, path.parent)}


def opened(family: str, name: Any, mode: str) -> Any:
    path = built(family)[name]
    return open_engine(EngineSpec(name, mode, "int8", "fp32", "cpu", 1, str(path), str(path.parent), (1, 4)))


def run(path: Path, given: dict[str, np.ndarray], extra: tuple[str, ...] = ()) -> list[np.ndarray]:
    """Runs without any graph optimization; returns the logits and the tensors named in `extra`."""
    model = onnx.load(path)
    for name in extra:
        model.graph.output.append(helper.make_empty_tensor_value_info(name))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(["logits", *extra], given)


@pytest.mark.first(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_answers_what_torch_answers(family: str) -> None:
    folder, float_path, path = made(family)
    given = features(family, 2)
    with torch.inference_mode():
        expected = forward(load(folder), as_tensors(given)).numpy()
    (found,), (floating,) = run(path, given), run(float_path, given)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert np.abs(found - floating).max() > 2e-2  # int8 is not float


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_is_in_the_graph_with_its_scales(family: str) -> None:
    folder, _, path = made(family)
    sites, found = load_sites(folder), {site.site: site for site in quantized_sites(Graph(path))}
    blocks = 2 if family == "bert" else 1
    assert set(found) == set(sites.names)
    assert len(found) == 4 * blocks
    for name, scales in sites.products.items():
        assert [float(operand.scale) for operand in found[name].operands] == [float(scales.left), float(scales.right)]
    for name, scale in sites.residuals.items():
        assert [float(operand.scale) for operand in found[name].operands] == [float(scale)]
    assert len(quantized_gemms(Graph(path))) == len(json.loads((folder / "quantization.json").read_text())["layers"])


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_codes_of_every_site_are_naive_integers(family: str) -> None:
    _, _, path = made(family)
    sites = quantized_sites(Graph(path))
    names = tuple(dict.fromkeys(name for site in sites for name in site.tensors))
    tensors = dict(zip(names, run(path, features(family, 2), names)[1:], strict=True))
    saturated = 0
    for site in sites:
        for operand in site.operands:
            steps = tensors[operand.input] / operand.scale
            expected = np.clip(np.rint(steps), -128, 127)
            saturated += int((np.abs(steps) > 128).sum())
            different = tensors[operand.codes] != expected
            assert not (different & (np.abs(np.abs(steps - np.floor(steps)) - 0.5) > 1e-3)).any(), site.site
        if site.site.endswith("/pv"):
            assert tensors[site.operands[0].input].sum(-1) == pytest.approx(1, abs=1e-5)  # probabilities: behind the softmax
    assert saturated > 0


@pytest.mark.first(1)
@NEEDS_VNNI
@pytest.mark.parametrize(("name", "mode"), ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_compute_the_sites_in_exact_integers(family: str, name: str, mode: str) -> None:
    folder, _, path = made(family)
    engine, given, sites = opened(family, name, mode), features(family, 2), quantized_sites(Graph(path))
    probed = [tensor for entries in (quantized_gemms(Graph(path)), sites) for entry in entries for tensor in entry.tensors]
    compared = compare_sites(sites, engine.probe(list(dict.fromkeys(probed)), given))
    assert all(found.passed and found.codes > 0 for found in compared), compared
    assert {found.layer for found in compared if found.sums} == set(load_sites(folder).products)
    with torch.inference_mode():
        expected = forward(load(folder), as_tensors(given)).numpy()
    np.testing.assert_allclose(engine.predict(given), expected, atol=0.1)


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "mode"), ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_products_run_in_int8_and_are_counted(family: str, name: str, mode: str) -> None:
    gemms = count_macs(Graph(made(family)[2]), 4, None if family in tiny.IMAGES else 24)
    told = opened(family, name, mode).precisions([gemm.node for gemm in gemms], 4, None if family in tiny.IMAGES else 24)
    products = [gemm for gemm in gemms if gemm.name.endswith(("/qk", "/pv"))]
    products = [gemm for gemm in products if "rotary" not in gemm.name]
    assert len(products) == (4 if family == "bert" else 2)
    assert {told[gemm.node] for gemm in products} == {"int8"}
    found = share([gemm for gemm in gemms if "rotary" not in gemm.name], told)
    layers = {gemm.name: gemm.macs for gemm in gemms if gemm.kind == "weight"}
    inside = sum(macs for layer, macs in layers.items() if "layer" in layer)
    attention = sum(gemm.macs for gemm in products)
    assert found.int8_share == pytest.approx(inside / sum(layers.values()))
    assert found.int8_share_all == pytest.approx((inside + attention) / (sum(layers.values()) + attention))
    assert found.int8_share_all > found.int8_share


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "mode"), ENGINES)
@pytest.mark.parametrize("kind", ["qk", "pv"])
@pytest.mark.parametrize("family", seldom(["bert", "vit"], ["vit"]))  # products of all families are told apart from layers above
def test_one_product_in_float_is_told_from_the_other(family: str, kind: str, name: str, mode: str, tmp_path: Path) -> None:
    path = variant(family, [site for site in load_sites(made(family)[0]).names if site.endswith(f"/{kind}")], tmp_path)
    file = openvino.convert(path, tmp_path)[0] if name == "openvino" else ort.with_uint8_activations(path, tmp_path)
    sequence = None if family in tiny.IMAGES else 24
    gemms = [gemm.node for gemm in count_macs(Graph(path), 4, sequence) if gemm.kind == "attention"]
    engine = open_engine(EngineSpec(name, mode, "int8", "fp32", "cpu", 1, str(file), str(tmp_path), (1, 4)))  # type: ignore[arg-type]
    told = engine.precisions(gemms, 4, sequence)
    assert told == {gemm: "int8" if gemm.endswith(f"/{kind}") else "fp32" for gemm in gemms}


def test_a_checkpoint_without_sites_keeps_its_graph(tmp_path: Path) -> None:
    path = variant("bert", [], tmp_path)
    assert quantized_sites(Graph(path)) == []
    assert len(quantized_gemms(Graph(path))) == 12


def test_a_tensor_with_one_scale_is_quantized_once(tmp_path: Path) -> None:
    folder, float_path, _ = made("bert")
    for name in ("quantization.json", "quantization.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    site = "bert.encoder.layer.0.attention.output.dense/residual"  # reads what the query reads
    same = next(gemm.input_scale for gemm in quantized_gemms(Graph(made("bert")[2])) if gemm.layer.endswith("layer.0.attention.self.query"))
    save_sites(tmp_path, Sites({}, {site: torch.tensor(float(same))}))
    shared = onnx.load(insert_qdq(Graph(float_path), Checkpoint(tmp_path), tmp_path / "shared.onnx")).graph
    save_sites(tmp_path, Sites({}, {site: torch.tensor(2 * float(same))}))
    apart = onnx.load(insert_qdq(Graph(float_path), Checkpoint(tmp_path), tmp_path / "apart.onnx")).graph
    count = [sum(node.op_type == "QuantizeLinear" for node in graph.node) for graph in (shared, apart)]
    assert count[0] + 1 == count[1]
    query = next(node for node in shared.node if node.name == "bert.encoder.layer.0.attention.self.query/MatMul")
    added = [node for node in shared.node if node.op_type == "Add" and query.input[0] in node.input]
    assert len(added) == 1
    assert quantized_sites(Graph(tmp_path / "shared.onnx")) == []  # the codes are compared where the query reads them


def test_zero_points_and_weights_stay_what_they_were() -> None:
    graph = onnx.load(made("bert")[2]).graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            assert tensors[node.input[2]] == 0
            assert tensors[node.input[1]].shape == ()


def test_same_bytes_twice(tmp_path: Path) -> None:
    folder, float_path, path = made("bert")
    assert insert_qdq(Graph(float_path), Checkpoint(folder), tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def scales(left: float, right: float) -> ProductScales:
    return ProductScales(torch.tensor(left), torch.tensor(right))


WRONG = {
    "no such product": (Sites({"bert.encoder.layer.7.attention.self/qk": scales(1.0, 1.0)}), "attention.self/qk is in the graph 0 times"),
    "no such layer": (Sites({}, {"bert.idle/residual": torch.tensor(1.0)}), "bert.idle/residual is in the graph 0 times"),
    "no addition": (
        Sites({}, {"bert.encoder.layer.0.intermediate.dense/residual": torch.tensor(1.0)}),
        "no addition follows the layer, but",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_site_that_is_not_in_the_graph_is_named(wrong: str, tmp_path: Path) -> None:
    folder, float_path, _ = made("bert")
    for name in ("quantization.json", "quantization.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    sites, message = WRONG[wrong]
    save_sites(tmp_path, sites)
    with pytest.raises(ValueError, match=message):
        insert_qdq(Graph(float_path), Checkpoint(tmp_path), tmp_path / "int8.onnx")


@pytest.mark.parametrize("harm", ["a code", "a sum", "a residual"])
def test_parity_sees_one_wrong_integer(harm: str) -> None:
    _, _, path = made("bert")
    sites = quantized_sites(Graph(path))
    names = tuple(dict.fromkeys(name for site in sites for name in site.tensors))
    tensors = dict(zip(names, (value.copy() for value in run(path, features("bert", 2), names)[1:]), strict=True))
    assert all(found.passed for found in compare_sites(sites, tensors))
    site = next(site for site in sites if site.site.endswith("/residual" if harm == "a residual" else "/qk"))
    if harm == "a sum":
        assert site.output is not None
        step = site.factor * float(np.prod([operand.scale for operand in site.operands]))
        tensors[site.output].flat[7] += np.float32(step)
    else:
        codes = tensors[site.operands[0].codes]
        codes.flat[7] += -1 if codes.flat[7] > 0 else 1
    wrong = {found.layer: found for found in compare_sites(sites, tensors) if not found.passed}
    assert list(wrong) == [site.site]
    assert (wrong[site.site].wrong_sums > 0) == (harm != "a residual")
    assert (wrong[site.site].different == 1) == (harm != "a sum")


def test_products_are_read_behind_their_scaling() -> None:
    graph = onnx.load(made("bert")[2]).graph
    site = next(site for site in quantized_sites(Graph(made("bert")[2])) if site.site.endswith("/qk"))
    assert site.factor == pytest.approx(0.5)  # heads of 4 features
    assert next(node.op_type for node in graph.node if site.output in node.output) == "Mul"
    assert products.RESIDUAL_CODES not in site.tensors
