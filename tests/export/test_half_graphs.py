"""Half graphs in a run: which half it is, what is built, what decides, and what export.json tells of it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from export.builds import Build, planned, rivals
from export.choices import Generation
from export.engines import tensorrt
from export.engines.registry import engine_module
from export.export import Export
from export.exporter import Exporter
from export.generation.agreement import Agreement
from export.graph.half_precision import Half
from export.half_graphs import RANGE_ROWS, HalfGraphs, range_rows
from foundation.artifacts.exported import Attentions, Engine, Fused
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from tests.export import half_graphs, sentiment
from tests.problems import raises_problem

pytestmark = [pytest.mark.whole, pytest.mark.slow, pytest.mark.usefixtures("engines_inside")]

TARGET = Target(engines=("onnxruntime", "tensorrt"), batch_sizes=(1, 2), sequence_lengths=(8,), threads=1)


def two(scratch: Path, target: Target = TARGET) -> Context:
    checkpoints = {"baseline": sentiment.checkpoint(), "quantize": sentiment.quantized()}
    context = sentiment.context(scratch, checkpoints, target, count=6)
    return replace(context, predictions={name: sentiment.answers(made.path, 6) for name, made in context.checkpoints.items()})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], list[str]]:
    """A run that proves its graphs for one compute capability, without a GPU."""
    out, context = tmp_path_factory.mktemp("out"), two(tmp_path_factory.mktemp("scratch"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt, "build_plans", partial(tensorrt.build_plans, capabilities=("89",)))
        Export(id="export").run(context.checkpoints["quantize"], context, out)
    return out, json.loads((out / "export.json").read_text())["builds"], context.progress.lines


def of_tensorrt(build: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in build["engines"] if entry["engine"] == "tensorrt"]


def test_int8_has_a_half_rest_and_the_float_model_a_half_build(exported: Any) -> None:
    _, builds, _ = exported
    assert [build["folder"] for build in builds] == ["baseline-fp32", "quantize-int8", "baseline-fp16"]
    told = [[(entry["float_precision"], entry["reason"]) for entry in of_tensorrt(build)] for build in builds]
    assert told == [[("fp32", tensorrt.PROVED)], [("fp16", tensorrt.PROVED)], [("fp16", tensorrt.PROVED)]]
    assert [entry["engine"] for entry in builds[2]["engines"]] == ["tensorrt"]  # other engines have no half graph


def test_every_product_is_int8_or_half_and_attention_passes_the_gate_or_has_its_reason(exported: Any) -> None:
    _, builds, _ = exported
    (entry,) = of_tensorrt(builds[1])
    types = {layer["name"]: layer["precision"] for layer in entry["compiled"]["layers"] if layer["kind"] == "weight"}
    assert {name for name, precision in types.items() if precision == "int8"} == {name for name in types if ".encoder." in name}
    assert set(types.values()) == {"int8", "fp16"}
    attention = entry["attention"]
    (group,) = attention["groups"]
    assert (attention["of"], len(group["nodes"]), group["group"]) == (2, 2, "4 heads of 8, mask [-1, 1, 1, -1]")
    assert "not supported by a dedicated kernel" in group["reason"]  # heads of 8 are too small for one
    assert group["reason"] in attention["reason"]


def test_the_entry_tells_what_stays_float32_and_who_decided(exported: Any) -> None:
    out, builds, lines = exported
    (entry,) = of_tensorrt(builds[1])
    facts = entry["half_graph"]
    assert (facts["half"], facts["range_rows"]) == ("fp16", 6)
    assert facts["islands"]["codes"] > 0
    assert (out / facts["plain"]).is_file()
    assert facts["fused"] is None  # no attention of this model passes the gate
    assert any("tensorrt: fp16 by the ranges of 6 rows alone; no engine ran whose answers could be judged" in line for line in lines)
    assert builds[1]["float_part"] is None


def test_the_half_graph_of_the_run_answers_as_its_float_graph(exported: Any) -> None:
    import onnxruntime

    out, builds, _ = exported
    (entry,) = of_tensorrt(builds[2])
    features = {
        "input_ids": np.array([[2, 5, 9, 3]]),
        "attention_mask": np.ones((1, 4), np.int64),
        "token_type_ids": np.zeros((1, 4), np.int64),
    }
    paths = out / "baseline-fp32" / "model.onnx", out / entry["half_graph"]["plain"]
    exact, half = (onnxruntime.InferenceSession(str(path)).run(None, features)[0] for path in paths)
    assert 0 < np.abs(half - exact).max() < 4e-3 * np.abs(exact).max()


@pytest.mark.parametrize("setting", ["fp16", "bf16"])
def test_the_setting_is_taken_where_it_is_given(setting: Half, tmp_path: Path) -> None:
    context = two(tmp_path)
    graphs = HalfGraphs(context, setting)
    assert graphs.half_of(tmp_path / "never read.onnx", context.preprocessor(sentiment.checkpoint())) == setting
    assert HalfGraphs(context, "fp32").half_of(tmp_path / "never read.onnx", context.preprocessor(sentiment.checkpoint())) is None


def scaled(by: float, out: Path) -> Path:
    """Writes the float graph with the first FFN larger and the layer behind it smaller by a factor."""
    model = onnx.load(str(sentiment.graph(sentiment.checkpoint())))
    for item in model.graph.initializer:
        for end, factor in {"layer.0.intermediate.dense.weight": by, "layer.0.output.dense.weight": 1 / by}.items():
            if item.name.endswith(end) and "attention" not in item.name:
                item.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(item) * np.float32(factor), item.name))
    onnx.save(model, str(out))
    return out


def test_auto_takes_bf16_where_fp16_would_leave_products_in_float32(tmp_path: Path) -> None:
    context = two(tmp_path)
    graphs, prepared = HalfGraphs(context, "auto"), context.preprocessor(sentiment.checkpoint())
    assert graphs.half_of(scaled(1.0, tmp_path / "same.onnx"), prepared) == "fp16"
    assert graphs.half_of(scaled(1e6, tmp_path / "large.onnx"), prepared) == "bf16"


def test_ranges_are_measured_once_for_each_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export import half_graphs as under_test

    calls = []
    monkeypatch.setattr(under_test, "measure", lambda *given: calls.append(1) or original(*given))
    original = __import__("export.graph.ranges", fromlist=["measure"]).measure
    context, path = two(tmp_path), scaled(1.0, tmp_path / "one.onnx")
    graphs, prepared = HalfGraphs(context, "auto"), context.preprocessor(sentiment.checkpoint())
    graphs.pick(path, prepared)
    made = graphs.write(path, "bf16", prepared, tmp_path)
    assert (len(calls), made.half, made.rows) == (1, "bf16", 6)


def test_ranges_are_of_selection_rows(tmp_path: Path) -> None:
    context = two(tmp_path)
    many = [f"row {number}" for number in range(500)]
    data = replace(context.data, selection=replace(context.data.selection, rows=many))
    found = range_rows(replace(context, data=data))
    assert len(found) == RANGE_ROWS
    assert set(found) <= set(many)
    empty = replace(context.data, selection=replace(context.data.selection, rows=[]))
    assert range_rows(replace(context, data=empty)) == context.data.train.rows


def test_fp16_needs_an_engine_that_has_it(tmp_path: Path) -> None:
    context = two(tmp_path, TARGET.model_copy(update={"engines": ("onnxruntime",)}))
    with raises_problem("stages.export.float_precision", "fp16", "tensorrt, torch_kernels or torch_kernels_decoder"):
        Export(float_precision="fp16").check(None, None, context)
    Export(float_precision="fp16").check(None, None, two(tmp_path))
    Export(float_precision="bf16").check(None, None, two(tmp_path))  # in its graph, whatever the processor has


def test_the_rival_is_the_float_model_behind_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: True)
    checkpoints = {"baseline": sentiment.checkpoint(), "prune": sentiment.checkpoint(), "quantize": sentiment.quantized()}
    builds = planned(sentiment.context(tmp_path, checkpoints), "ends")
    assert [build.name for build in rivals(builds, "fp16")] == ["prune-fp16"]
    assert rivals(builds, "bf16") == []  # there already, for OpenVINO


def judged(tmp_path: Path, build: Build, answers: dict[Any, Any], half: str = "fp16") -> Any:
    context = two(tmp_path / "scratch", TARGET.model_copy(update={"device": "cuda", "engines": ("tensorrt",)}))
    (tmp_path / "out").mkdir()
    graphs = HalfGraphs(context, "auto", "fp16")
    made = Exporter(build, context, tmp_path / "out", "auto", answers, Agreement(context, Generation()), graphs)
    entries = [Engine(engine="tensorrt", mode="dynamic", float_precision=name, runnable=True) for name in ("fp32", half)]
    found = made._judgement("tensorrt", entries)
    return found, [*context.progress.lines, *context.progress.warnings]


ONES = np.ones((1, 4), np.int64)
FLOATING = np.float32([[1, 0], [0, 1], [2, 1]])


@pytest.mark.parametrize(("moved", "expected"), [(0.001, "fp16"), (2.0, "fp32")])
@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_where_tensorrt_runs_its_answers_decide(tmp_path: Path, precision: str, moved: float, expected: str) -> None:
    build = Build("quantize" if precision == "int8" else "baseline", Checkpoint(sentiment.checkpoint()), precision, "baseline")
    away = np.float32([[moved, 0], [0, 0], [0, 0]])
    answers = {
        ("tensorrt", "baseline", "fp32", "fp32"): FLOATING,
        ("tensorrt", "quantize", "int8", "fp32"): FLOATING + np.float32(1e-3),
        ("tensorrt", build.variant, precision, "fp16"): FLOATING + away,
    }
    found, lines = judged(tmp_path, build, answers)
    assert (found.precision, found.rows) == (expected, 3)
    assert any(f"float part in {expected}" in line for line in lines)


def test_a_half_without_a_float_engine_beside_it_is_not_judged_and_that_is_said(tmp_path: Path) -> None:
    build = Build("quantize", Checkpoint(sentiment.quantized()), "int8", "baseline")
    found, lines = judged(tmp_path, build, {("tensorrt", "quantize", "int8", "fp16"): FLOATING})
    assert found is None
    assert "quantize-int8 tensorrt: fp16 cannot be judged, since an engine in fp32 was not built" in lines


def test_on_a_gpu_both_rests_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def build(graph: Path, folder: Path, **settings: Any) -> list[Engine]:
        half = settings.get("half")
        asked.append((graph.name, None if half is None else half.plain.name))
        return [Engine(engine="tensorrt", float_precision="fp32" if half is None else half.half)]

    monkeypatch.setattr(tensorrt, "build_plans", build)
    context = two(tmp_path / "scratch")
    source = half_graphs.quantized("ragged")
    prepared = context.preprocessor(sentiment.checkpoint())
    graph = HalfGraphs(context, "fp16")
    graph._ranges[source] = half_graphs.measured(source)[1], 6
    request = request_of(tmp_path, source, graph.write(source, "fp16", prepared, tmp_path))
    monkeypatch.setattr(tensorrt, "absence", lambda device: None)
    assert [entry.float_precision for entry in tensorrt.build(request)] == ["fp32", "fp16"]
    monkeypatch.setattr(tensorrt, "absence", lambda device: "no GPU")
    assert [entry.float_precision for entry in tensorrt.build(request)] == ["fp16"]
    monkeypatch.setattr(tensorrt, "absence", lambda device: None)
    assert [entry.float_precision for entry in tensorrt.build(replace(request, precision="fp16"))] == ["fp16"]
    assert asked[:2] == [("ragged-int8.onnx", None), ("ragged-int8.onnx", "ragged-int8_fp16.onnx")]


def request_of(root: Path, model: Path, graph: Any) -> Any:
    from export.engines.spec import BuildRequest

    fields = {
        "engine": "tensorrt",
        "checkpoint": Checkpoint(root),
        "model": model,
        "root": root,
        "folder": root,
        "shared": root,
        "precision": "int8",
    }
    more = {"float_precision": "fp32", "bf16_float_part": False, "half_graph": graph, "buckets": (16,), "target": TARGET}
    return BuildRequest(**fields, **more, log=lambda line: None)


def test_a_group_that_a_build_refused_leaves_the_graph_that_is_deployed(tmp_path: Path) -> None:
    from export.graph.attention import fuse_attention

    source = half_graphs.graph("ragged")
    halved = half_graphs.halved(source).model
    plain, fused = tmp_path / "plain.onnx", tmp_path / "fused.onnx"
    onnx.save(halved, str(plain))
    onnx.save(fuse_attention(halved, {}).model, str(fused))
    names = [f"bert.encoder.layer.{index}.attention.self/attention" for index in (0, 1)]

    def entry(*reasons: str | None) -> Engine:
        groups = tuple(Attentions(group="g", nodes=(name,), reason=why) for name, why in zip(names, reasons, strict=True))
        return Engine(attention=Fused(groups=groups))

    assert tensorrt._narrow(plain, fused, [entry(None, None), Engine()])
    assert nodes_of(fused) == names
    assert tensorrt._narrow(plain, fused, [entry(None, None), entry(None, "no kernel")])
    assert nodes_of(fused) == names[:1]
    assert not tensorrt._narrow(plain, fused, [entry("no kernel", "no kernel")])
    assert not fused.exists()


def nodes_of(path: Path) -> list[str]:
    return [node.name for node in onnx.load(str(path)).graph.node if node.op_type == "Attention"]


def test_products_are_split_for_strongly_typed_engines_alone(tmp_path: Path) -> None:
    source = half_graphs.quantized("gpt2")
    typed, other = engine_module("tensorrt"), engine_module("onnxruntime")
    found = typed.own_graph("int8", source, tmp_path)
    assert found == tmp_path / "model_split.onnx"
    assert "Split" not in {node.op_type for node in onnx.load(str(found)).graph.node}
    assert other.own_graph("int8", source, tmp_path) == source
    assert typed.own_graph("fp32", source, tmp_path) == source
    assert typed.own_graph("int8", half_graphs.quantized("ragged"), tmp_path) == half_graphs.quantized("ragged")  # nothing to split
