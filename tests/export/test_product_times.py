"""Products without zero slices in whole exports: which of them change, and that engines answer as torch. No clock is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.builds import Build
from export.choices import Generation
from export.export import Export
from export.exporter import Exporter
from export.generation.agreement import Agreement
from export.graph.macs import count_macs
from export.graph.onnx import export_float
from export.graph.zero_slices import Extent, drop_zero_slices, products
from export.product_times import ProductTimes, layer, one_image, rounded, without_zero_slices
from foundation.artifacts.graph import Graph
from foundation.core.target import Target
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import LayerScales, levels, on_grid, weight_scale
from tests.export import sentiment
from tests.problems import raises_problem

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sparse(folder: Path) -> Path:
    """Writes the tiny classifier with zero outputs, zero inputs, and one matrix without any number."""
    model = load(sentiment.checkpoint())
    block = model.get_submodule("bert.encoder.layer.0")
    with torch.no_grad():
        block.intermediate.dense.weight[5:60] = 0
        block.output.dense.weight[:, 5:60] = 0
        block.output.dense.weight[3::4] = 0
        block.attention.self.value.weight[:, ::2] = 0
        block.attention.output.dense.weight.zero_()
    folder.mkdir()
    save(model, sentiment.checkpoint(), folder, "zeros")
    return folder


def in_int8(source: Path, folder: Path) -> Path:
    """Writes a checkpoint with the linear layers of its encoder in int8."""
    model, scales = load(source), {}
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear) and ".encoder." in name:
            scale_O = weight_scale(linear.weight.data, levels(7))
            linear.weight.data = on_grid(linear.weight.data, scale_O, levels(7))
            scales[name] = LayerScales(scale_O, torch.tensor(0.03), 7)
    folder.mkdir()
    save(model, source, folder, "Quantized")
    save_quantization(folder, scales, {"classifier": "head"})
    return folder


def timed(monkeypatch: pytest.MonkeyPatch, faster: float) -> list[Any]:
    """Lets the engine without zero slices take `faster` times the milliseconds of the other; returns the calls."""
    calls: list[Any] = []

    def measure(specs: Sequence[Any], shapes: Sequence[Any], progress: Any) -> list[tuple[int, Any]]:
        calls.append(([Path(spec.path).parent.name for spec in specs], list(shapes)))
        return [(number, type("Row", (), {"median_ms": ms})()) for number, ms in enumerate((2.0, 2.0 * faster))]

    monkeypatch.setattr("foundation.measure.latency.measure", measure)
    return calls


@given(st.integers(1, 400), st.integers(1, 400), st.data())
def test_sizes_are_rounded_up_to_sixteenths(inputs: int, outputs: int, data: Any) -> None:
    extent = Extent(inputs, outputs, data.draw(st.integers(0, inputs)), data.draw(st.integers(0, outputs)), True)
    found = rounded(extent)
    for count, side, up in ((extent.read, inputs, found.read), (extent.written, outputs, found.written)):
        assert count <= up <= side
        assert up - count < max(1, side // 16)
        assert up == side or up % max(1, side // 16) == 0
    assert rounded(found) == found


@pytest.mark.parametrize("integer", [False, True])
def test_a_layer_that_is_timed_has_the_extent_and_the_rows(integer: bool, tmp_path: Path) -> None:
    extent = Extent(24, 12, 6, 5, integer)
    model = layer(extent, 7)
    (product,) = products(model.graph)
    assert product.extent == extent
    onnx.save(model, tmp_path / "m.onnx")
    assert [gemm.macs for gemm in count_macs(Graph(tmp_path / "m.onnx"), 2, None)] == [2 * 7 * 24 * 12]
    assert one_image(7, 24, 12).shape == (1, 7, 24)
    drop_zero_slices(model.graph, lambda product: True)
    onnx.save(model, tmp_path / "m.onnx")
    assert [gemm.macs for gemm in count_macs(Graph(tmp_path / "m.onnx"), 2, None)] == [2 * 7 * 6 * 5]


@pytest.mark.first(1)
@pytest.mark.parametrize(("faster", "changes"), [(0.5, True), (0.97, False), (2.0, False)])
def test_a_product_changes_where_that_is_faster(faster: float, changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, folder = timed(monkeypatch, faster), sparse(tmp_path / "sparse")
    context = sentiment.context(tmp_path, {"model": folder})
    prepared = context.preprocessor(folder)
    model = export_float(Checkpoint(folder), prepared, tmp_path / "model.onnx")
    before = model.read_bytes()
    changed = without_zero_slices(model, ProductTimes(context, Checkpoint(folder), tmp_path), prepared)
    names = {product.layer.rpartition("layer.0.")[2] for product in changed}
    always = {"attention.output.dense"}  # a bias is not timed
    some = {"intermediate.dense", "output.dense", "attention.self.value"}
    assert names == (always | some if changes else always)
    assert all(call == (["whole", "without"], [(1, None)]) for call in calls)
    assert len(calls) == 3
    assert model.read_bytes() != before
    again = without_zero_slices(model, ProductTimes(context, Checkpoint(folder), tmp_path), prepared)
    assert len(calls) == 3  # what was timed is kept
    assert not again


def test_products_are_timed_at_the_rows_of_the_largest_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows of up to 16 tokens."""
    seen: dict[Extent, int] = {}
    monkeypatch.setattr(ProductTimes, "of", lambda self, extent, rows: (seen.setdefault(extent, rows), (1.0, 1.0))[1])
    folder = sparse(tmp_path / "sparse")
    context = sentiment.context(tmp_path, {"model": folder})
    prepared = context.preprocessor(folder)
    model = export_float(Checkpoint(folder), prepared, tmp_path / "model.onnx")
    without_zero_slices(model, ProductTimes(context, Checkpoint(folder), tmp_path), prepared)
    assert {(extent.inputs, extent.outputs): rows for extent, rows in seen.items()} == dict.fromkeys(((32, 32), (32, 64), (64, 32)), 4 * 16)


@pytest.mark.first(1)
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("quantized", [False, True])
def test_an_engine_without_zero_slices_answers_as_torch(
    engine: Any, quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parity of layers compares every integer sum with the engine's own codes."""
    timed(monkeypatch, 0.1)
    folder = sparse(tmp_path / "sparse")
    if quantized:
        folder = in_int8(folder, tmp_path / "int8")
    target = Target(engines=(engine,), batch_sizes=(1,), sequence_lengths=(8,), threads=1)
    context = sentiment.context(tmp_path / "scratch", {"model": folder}, target, count=6)
    (tmp_path / "out").mkdir()
    build = Build("model", Checkpoint(folder), "int8" if quantized else "fp32", "model")
    exporter = Exporter(build, context, tmp_path / "out", "fp32", {}, Agreement(context, Generation()), zeros="auto")
    entry = exporter.run()
    graph = Graph(tmp_path / "out" / build.name / "model.onnx")
    assert products(graph.load().graph) == []
    runnable = [one for one in entry.engines if one.runnable]
    assert runnable
    assert entry.parity is not None
    assert all(one.predictions for one in runnable)


def test_what_cannot_be_timed_is_refused(tmp_path: Path) -> None:
    target = Target(engines=("torch", "openvino"), batch_sizes=(1,), sequence_lengths=(8,), threads=1)
    context = sentiment.context(tmp_path, {"model": sentiment.checkpoint()}, target)
    with raises_problem("export.zeros", "auto", "torch", "multiply"):
        Export(zeros="auto").check(Checkpoint(sentiment.checkpoint()).config, None, context)
