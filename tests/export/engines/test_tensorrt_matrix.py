"""Ahead of time, without a GPU: what compiles for which compute capability, in which precision, and whether attention is fused.

Each build is one of TensorRT-RTX in a process of its own. The table of docs/explanation/tensorrt.md is what they print:

    python -m pytest -p no:xdist -m "slow or not slow" -s tests/export/engines/test_tensorrt_matrix.py
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest

from export.engines import tensorrt
from export.graph.attention import fuse_attention
from export.half_graphs import HalfGraph
from tests.export import half_graphs
from tests.export.half_graphs import LENGTH
from tests.seldom import seldom

pytestmark = pytest.mark.whole

ATTENTIONS = {"bert": 2, "ragged": 2, "vit": 2, "gpt2": 2, "t5": 6, "bert-base": 12}
SINGLE = {"ragged": ["1 head of 32, mask [-1, 1, 1, -1]"]}
"""Groups that do not pass the gate: a single head has no kernel of its own. The other groups of the same model pass."""
PRECISIONS = ("fp32", "fp16", "bf16", "int8+fp16")
BUCKETS, LARGEST = (16, LENGTH), 4
COMPILED = ("80", "86", "89", "120")
UNKNOWN = ("90", "100")
"""Hopper and data-center Blackwell: TensorRT-RTX is for RTX GPUs and has no such target."""
FAST = {("ragged", "fp16", "89"), ("vit", "int8+fp16", "120")}
"""Float with a group of its own that is left out, and integers with all of their attention fused. The test of the gate builds float32."""
EVERY = [
    pytest.param(
        kind,
        precision,
        capability,
        marks=[pytest.mark.slow] * ((kind, precision, capability) not in FAST),
    )
    for kind in ATTENTIONS
    for precision in PRECISIONS
    for capability in (COMPILED if precision != "bf16" else COMPILED[-1:])
]


@cache
def graphs(kind: str, precision: str, folder: Path) -> tuple[Path, HalfGraph | None]:
    """Writes the graphs of a model in a precision; returns that with float32, and its half graph."""
    source = half_graphs.split(half_graphs.quantized(kind)) if precision.startswith("int8") else half_graphs.graph(kind)
    if precision == "fp32":
        return source, None
    half = "bf16" if precision == "bf16" else "fp16"
    halved = half_graphs.halved(source, half)
    fused = fuse_attention(halved.model, half_graphs.measured(source)[1].largest)
    paths = folder / f"{kind}-{precision}.onnx", folder / f"{kind}-{precision}-fused.onnx"
    onnx.save(halved.model, str(paths[0]))
    onnx.save(fused.model, str(paths[1]))
    return source, HalfGraph(half, *paths, {}, 0, 0, fused.left)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def proved(kind: str, precision: str, capability: str, folder: Path) -> dict[str, Any]:
    """Builds one cell of the matrix; returns its entry."""
    source, half = graphs(kind, precision, folder)
    buckets = () if kind == "vit" else BUCKETS
    settings = {"precision": "int8" if precision.startswith("int8") else precision, "buckets": buckets, "max_batch_size": LARGEST}
    (entry,) = tensorrt.build_plans(source, folder, capabilities=(capability,), half=half, log=lambda line: None, **settings)
    return entry.written()


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "precision", "capability"), EVERY)
def test_it_compiles_to_the_types_of_the_graph_with_its_attention_fused(kind, precision, capability, folder):
    entry = proved(kind, precision, capability, folder)
    assert entry["reason"] == tensorrt.PROVED, entry["reason"]
    attention, listed = entry["attention"], entry["compiled"]["layers"]
    figures = f"{entry['size_bytes'] / 1e6:.2f} MB, {entry['num_layers']} layers, {attention['fused']} of {attention['of']}"
    print(f"| {kind} | {precision} | {capability} | {figures} | {entry['seconds']:.1f} s |")
    halves = precision != "fp32"
    assert attention["of"] == ATTENTIONS[kind]
    groups = {group["group"]: group["reason"] for group in attention["groups"]}
    failed = [group for group, reason in groups.items() if reason is not None]
    assert failed == (SINGLE.get(kind, []) if halves else [])
    assert sum(len(group["nodes"]) for group in attention["groups"]) == (ATTENTIONS[kind] if halves else 0)
    if failed:
        promised = sum(len(group["nodes"]) for group in attention["groups"] if group["reason"] is None)
        assert attention["required"] == promised
        assert 1 <= promised <= attention["fused"] <= ATTENTIONS[kind]  # the rest is fused where the library likes to
        assert "not supported by a dedicated kernel" in attention["reason"]
    else:
        assert attention["fused"] == attention["required"] == (ATTENTIONS[kind] if halves else 0)
        assert attention["reason"] == (None if halves else tensorrt.NO_NODES)
    types = {layer["precision"] for layer in listed if layer["kind"] == "weight"}
    rest = precision.removeprefix("int8+")
    apart = ["fp32"] * ((kind, precision) == ("vit", "bf16"))  # ONNX has no Conv in bf16 before opset 22
    assert types <= {rest, *apart, *(["int8"] if precision.startswith("int8") else [])}
    assert {layer["precision"] for layer in listed if layer["kind"] == "attention"} == {rest}
    if precision.startswith("int8"):
        quantized = {layer["name"] for layer in listed if layer["precision"] == "int8"}
        source = onnx.load(str(half_graphs.quantized(kind))).graph
        assert quantized == {item.name.removesuffix(".weight.codes") for item in source.initializer if item.name.endswith(".weight.codes")}


@pytest.mark.parametrize("capability", seldom(UNKNOWN, UNKNOWN[1:]))
def test_capabilities_that_the_library_lacks_are_refused_in_its_words(capability, folder):
    entry = proved("ragged", "fp16", capability, folder)
    assert f"does not know compute capability {capability}" in entry["reason"]


@pytest.mark.slow
def test_attention_in_float32_has_no_fused_kernel_and_the_build_falls_back(folder):
    """The gate: a node of attention that no kernel runs fails the build, and the entry of the other graph says so."""
    plain, _ = graphs("ragged", "fp32", folder)
    fused = in_float32(graphs("ragged", "fp16", folder)[1].fused)
    settings = {"precision": "fp32", "buckets": BUCKETS, "max_batch_size": LARGEST, "capabilities": ("89",)}
    half = HalfGraph("fp16", plain, fused, {}, 0, 0, {})
    (entry,) = tensorrt.build_plans(plain, folder, half=half, log=lambda line: None, **settings)
    attention = entry.attention
    assert (attention.fused, attention.of) == (0, 2)
    assert all(group.reason for group in attention.groups)
    assert "not supported by a dedicated kernel" in attention.reason
    assert entry.reason == tensorrt.PROVED


def in_float32(path: Path) -> Path:
    """Writes a half graph in float32 throughout, its attention still one node each."""
    model = onnx.load(str(path))
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    for item in model.graph.initializer:
        if item.data_type == half:
            item.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(item).astype("float32"), item.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == half:
                attribute.i = single
    out = path.with_name("single-fused.onnx")
    onnx.save(model, str(out))
    return out
