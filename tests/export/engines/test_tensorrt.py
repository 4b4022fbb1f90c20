import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import tensorrt_rtx_bindings as rtx
from onnx import TensorProto, helper

from export.engines import tensorrt
from export.graph.onnx import GEMMS, export_float
from export.graph.qdq import insert_qdq
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.standalone.cuda_driver import CudaError, Device, capabilities
from foundation.standalone.tensorrt_layers import (
    float_precision,
    gemm_precisions,
    inspected_layers,
    listed_layers,
)
from foundation.standalone.tensorrt_plan import Plan, PlanError, build, profile_ranges
from tests.export import tiny_checkpoints as tiny
from tests.export.tensorrt_stand_in import Driver, StandIn

pytestmark = pytest.mark.whole

BUCKETS, LARGEST = (16, 40), 4
PROVED = {"fp32": ("89",), "int8": ("80", "89")}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """A tiny BERT in float and with Q/DQ at every encoder linear; the names of these."""
    folder = tmp_path_factory.mktemp("bert")
    prepared = tiny.write(folder / "float", "bert")
    names = [name for name in tiny.linears(tiny.load(folder / "float", "bert")) if ".encoder." in name]
    quantized = tiny.quantize(folder / "float", "bert", dict.fromkeys(names, 0.05), folder / "quantized")
    floating = export_float(Checkpoint(quantized), prepared, folder / "float.onnx")
    return floating, insert_qdq(Graph(floating), Checkpoint(quantized), folder / "int8.onnx"), names


@pytest.fixture(scope="module")
def proofs(graphs, tmp_path_factory):
    """What `build` gives for both graphs and two capabilities, and what it logs."""
    lines = []
    floating, quantized, _ = graphs
    out = tmp_path_factory.mktemp("out")
    settings = {"buckets": BUCKETS, "max_batch_size": LARGEST, "log": lines.append}
    entries = {
        precision: [
            entry.written() for entry in tensorrt.build_plans(path, out, precision=precision, capabilities=PROVED[precision], **settings)
        ]
        for precision, path in (("fp32", floating), ("int8", quantized))
    }
    return entries, lines, out


@pytest.fixture(scope="module")
def built(graphs):
    """Both graphs, compiled once: the stand-in that did it and what it gave. Plans of any stand-in are opened by every other one."""
    made = []
    for path in graphs[:2]:
        stand_in = StandIn()
        made.append((stand_in, build(stand_in, path, BUCKETS, LARGEST)))
    return made


def test_every_capability_is_proved_and_nothing_more_is_claimed(proofs):
    entries, lines, out = proofs
    for precision, found in entries.items():
        assert tuple(entry["capability"] for entry in found) == PROVED[precision]
        for entry in found:
            assert entry["runnable"] is False
            assert entry["int8_share"] is None
            assert entry["file"] is None
            assert "without a GPU" in entry["reason"]
            assert "inspected on its GPU" in entry["int8_share_reason"]
            assert entry["size_bytes"] > 10_000
            assert entry["seconds"] > 0
            assert rtx.__version__ in entry["library"]
    assert len(lines) == 3
    assert not list(out.iterdir())
    assert json.loads(json.dumps(entries)) == entries


def test_compiler_lists_int8_for_exactly_the_quantized_layers(proofs, graphs):
    entries, _, _ = proofs
    names = set(graphs[2])
    for entry in entries["int8"]:
        listed = {layer["name"]: layer["precision"] for layer in entry["compiled"]["layers"] if layer["kind"] == "weight"}
        assert {name for name, precision in listed.items() if precision == "int8"} == names
        assert set(listed.values()) == {"int8", "fp32"}
        weights = [layer for layer in entry["compiled"]["layers"] if layer["kind"] == "weight"]
        expected = sum(layer["macs"] for layer in weights if layer["name"] in names) / sum(layer["macs"] for layer in weights)
        assert entry["compiled"]["int8_share"] == pytest.approx(expected)
        assert f"{len(names)} of {len(weights)} weight GEMMs" in entry["int8_share_reason"]
    assert [entry["compiled"]["int8_share"] for entry in entries["fp32"]] == [0.0]


def test_one_profile_per_bucket_with_a_fixed_sequence(built):
    stand_in, made = built[1]
    assert stand_in.built[0]["profiles"] == len(BUCKETS)
    ranges = json.loads(made.plan)["ranges"]
    assert [profile["input_ids"] for profile in ranges] == [[[1, size], [LARGEST, size], [LARGEST, size]] for size in BUCKETS]
    per_profile = Counter(layer.kind for layer in listed_layers(made.listing))
    assert per_profile["gemm"] % len(BUCKETS) == 0
    assert made.timing_cache == b"times"


@pytest.mark.parametrize(
    ("shape", "bucket", "expected"),
    [((-1, -1), 32, ((1, 32), (8, 32), (8, 32))), ((-1, 3, 12, 12), None, ((1, 3, 12, 12), (8, 3, 12, 12), (8, 3, 12, 12)))],
)
def test_profile_ranges(shape, bucket, expected):
    assert profile_ranges("x", shape, bucket, 8) == expected


@pytest.mark.parametrize(("shape", "bucket"), [((-1, -1), None), ((2, -1), 32), ((-1, 3, -1, 12), None)])
def test_profile_of_an_axis_left_open_is_refused(shape, bucket):
    with pytest.raises(PlanError, match="input x has shape"):
        profile_ranges("x", shape, bucket, 8)


def broken(path: Path) -> Path:
    """A graph with an operator that nobody knows."""
    nodes = [helper.make_node("Relu", ["x"], ["h"], name="first"), helper.make_node("NoSuchOp", ["h"], ["y"], name="encoder.odd/NoSuchOp")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", values[:1], values[1:]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    onnx.save(model, str(path))
    return path


def test_parse_error_names_the_node(tmp_path):
    with pytest.raises(PlanError, match=r"node encoder\.odd/NoSuchOp \(NoSuchOp\): .*Plugin not found"):
        build(rtx, broken(tmp_path / "bad.onnx"), (), 2, capability="80")


def test_a_build_that_fails_is_an_entry_with_the_librarys_words(tmp_path):
    job = {"library": tensorrt.RTX, "onnx": str(broken(tmp_path / "bad.onnx")), "buckets": [], "max_batch_size": 2, "capability": "80"}
    answer = tensorrt.run_child({**job, "plan": None, "timing_cache": None})
    assert "encoder.odd/NoSuchOp" in answer["error"]


def test_unknown_capability(graphs):
    with pytest.raises(PlanError, match="does not know compute capability 42"):
        build(rtx, graphs[0], BUCKETS, LARGEST, capability="42")


def test_a_crash_of_the_library_is_reported(monkeypatch, tmp_path):
    (tmp_path / "crashing.py").write_text("import os, sys\nprint('out of luck', file=sys.stderr, flush=True)\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = tensorrt.run_child({"library": "crashing"})
    assert "crashing ended with status -6" in answer["error"]
    assert "out of luck" in answer["error"]


def test_without_any_library_the_entry_says_what_to_install(monkeypatch, graphs, tmp_path):
    monkeypatch.setitem(sys.modules, tensorrt.RTX, None)
    monkeypatch.setattr(tensorrt, "installed", lambda module: False)
    lines = []
    (entry,) = tensorrt.build_plans(graphs[0], tmp_path, precision="fp32", buckets=BUCKETS, max_batch_size=2, log=lines.append)
    assert entry.runnable is False
    assert "pip install 'compress-transformers[tensorrt]'" in entry.reason
    assert lines == [entry.reason]


def test_a_folder_of_type_stubs_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "only_stubs").mkdir()
    (tmp_path / "only_stubs" / "__init__.pyi").write_text("class Builder: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not tensorrt.installed("only_stubs")
    assert tensorrt.installed("tensorrt_rtx_bindings")


def test_unknown_precision(tmp_path):
    with pytest.raises(ValueError, match="precision int3; allowed: fp32, fp16, bf16, int8"):
        tensorrt.build_plans(tmp_path / "x", tmp_path, precision="int3", buckets=(), max_batch_size=1, log=print)


@pytest.mark.parametrize(("which", "rows", "length"), [(0, 4, 16), (1, 1, 40), (1, 11, 16)])
def test_a_plan_predicts_what_the_graph_computes(graphs, built, which, rows, length):
    import onnxruntime

    stand_in, driver = StandIn(), Driver("90")
    plan = Plan(stand_in, Device(driver), built[which][1].plan)
    features = tiny.features("bert", rows, length)
    logits = plan.predict(features)
    expected = onnxruntime.InferenceSession(str(graphs[which])).run(["logits"], features)[0]
    assert logits.shape == (rows, 3)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_plan_refuses_a_length_that_is_no_bucket(built):
    stand_in = StandIn()
    plan = Plan(stand_in, Device(Driver("90")), built[0][1].plan)
    with pytest.raises(PlanError, match="no profile"):
        plan.predict(tiny.features("bert", 1, 20))


def test_a_plan_of_another_version_does_not_load():
    with pytest.raises(PlanError, match="does not load"):
        Plan(StandIn(), Device(Driver("90")), b"something else")


def test_inspector_layers_give_precisions(graphs, built):
    stand_in = StandIn()
    plan = Plan(stand_in, Device(Driver("90")), built[1][1].plan)
    nodes = [node for node in onnx.load(str(graphs[1])).graph.node if node.op_type in GEMMS]
    precisions = gemm_precisions(inspected_layers(plan.information()), [node.name for node in nodes])
    assert {name.rsplit("/", 1)[0] for name, precision in precisions.items() if precision == "int8"} == set(graphs[2])
    assert len(precisions) == len(nodes)
    assert float_precision(inspected_layers(plan.information())) == "fp32"


def test_a_graph_answers_what_the_plan_does_with_the_rows_that_lie_there_then(built):
    stand_in, driver = StandIn(), Driver("90")
    plan = Plan(stand_in, Device(driver), built[1][1].plan)
    features = tiny.features("bert", 11, 16)
    np.testing.assert_array_equal(plan.predict(features, graph=True), plan.predict(features))
    assert len(driver.launched) == 3  # 4, 4 and 3 rows
    features = tiny.features("bert", 3, 16)
    ran = plan.ready(features, graph=True)
    before = len(driver.launched)
    ran()
    ran()
    assert driver.launched[before:] == driver.launched[-1:] * 2
    plan.ready(features)()
    assert len(driver.launched) == before + 2
    assert driver.graphs == {}


def test_a_recording_that_writes_nothing_is_seen(built, monkeypatch):
    stand_in, driver = StandIn(), Driver("90")
    plan = Plan(stand_in, Device(driver), built[1][1].plan)
    monkeypatch.setattr(Driver, "cuGraphLaunch", lambda self, executable, stream: 0)
    assert np.isnan(plan.predict(tiny.features("bert", 2, 16), graph=True)).all()


def test_batches_of_one_shape_in_a_row_are_recorded_at_the_second(built):
    stand_in, driver = StandIn(), Driver("90")
    made = built[1][1].plan
    plan, naive = Plan(stand_in, Device(driver), made, graphs=True), Plan(stand_in, Device(Driver("90")), made)
    wanted = [0, 1, 2, 2, 2, 3, 4, 4]  # launches of graphs after each of these batches
    shapes = [(2, 16), (2, 16), (2, 16), (3, 16), (1, 40), (1, 40), (1, 40), (2, 16)]
    for (rows, length), launches in zip(shapes, wanted, strict=True):
        features = tiny.features("bert", rows, length)
        features["input_ids"] = (features["input_ids"] + len(driver.launched) + rows) % 9
        np.testing.assert_array_equal(plan.predict(features), naive.predict(features))
        assert len(driver.launched) == launches
    assert len(set(driver.launched)) == 2
    assert len(driver.executables) == 1  # that of 40; the one of 2 x 16 ended with its shape
    plan.information()
    assert len(plan.predict(tiny.features("bert", 1, 40))) == 1
    assert (len(driver.launched), driver.executables) == (4, {})


def test_a_batch_that_is_rejected_leaves_no_recording_of_the_one_before(built):
    stand_in, driver = StandIn(), Driver("90")
    plan = Plan(stand_in, Device(driver), built[1][1].plan, graphs=True)
    features = tiny.features("bert", 2, 16)
    plan.predict(tiny.features("bert", LARGEST, 40))  # no buffer grows from now on, which would be another address
    first = plan.predict(features)
    plan.predict(features)
    assert len(driver.launched) == 1
    with pytest.raises(PlanError, match="is rejected"):
        plan.ready(tiny.features("bert", LARGEST + 1, 16))
    np.testing.assert_array_equal(plan.predict(features), first)
    assert (len(driver.launched), driver.executables) == (1, {})  # the context was given its shapes again


@pytest.mark.parametrize("call", ["cuStreamEndCapture", "cuGraphInstantiateWithFlags"])
def test_a_plan_that_cannot_be_recorded_runs_kernel_by_kernel_and_warns_once(built, call):
    stand_in, driver = StandIn(), Driver("90", fail=call)
    made = built[1][1].plan
    plan, features = Plan(stand_in, Device(driver), made, graphs=True), tiny.features("bert", 2, 16)
    first = plan.predict(features)
    with pytest.warns(UserWarning, match=f"runs kernel by kernel: {call}") as warned:
        assert all((plan.predict(features) == first).all() for _ in range(3))
    assert len(warned) == 1
    assert (driver.launched, driver.graphs, Driver.recording) == ([], {}, None)
    with pytest.raises(CudaError, match=call):
        plan.predict(features, graph=True)


def test_work_that_fails_leaves_the_stream_as_it_was():
    driver = Driver("90")
    device = Device(driver)

    def work():
        raise PlanError("why")

    with pytest.raises(PlanError, match="why"):
        device.record(work)
    assert (Driver.recording, driver.graphs, driver.executables) == (None, {}, {})
    with pytest.raises(CudaError, match="cuStreamSynchronize"):
        device.record(device.wait)
    assert Driver.recording is None
    graph = device.record(lambda: None)
    graph.launch()
    graph.close()
    assert driver.executables == {}


def test_memory_grows_and_is_given_back():
    driver = Driver("90")
    device = Device(driver)
    first = device.block("x", 8)
    assert device.block("x", 4) == first
    assert device.block("y", 8) != first
    device.block("x", 64)
    assert len(driver.freed) == 1
    values = np.arange(7, dtype=np.float32)
    device.upload(values, device.block("x", values.nbytes))
    np.testing.assert_array_equal(device.download(device.block("x", 1), (7,), np.float32), values)


def test_capabilities_of_all_gpus():
    assert capabilities(Driver("80", "120")) == ("80", "120")
    assert capabilities(Driver()) == ()
    assert capabilities(None) == ()


def test_driver_errors_name_the_call():
    device = Device(Driver("90", fail="cuMemAlloc_v2"))
    with pytest.raises(CudaError, match=r"cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        device.block("x", 8)


def test_a_crash_of_the_gate_falls_back_to_separate_products(monkeypatch, tmp_path):
    answers = {
        "fused": {"error": "crashed"},
        "plain": {"library": "L", "version": "1", "seconds": 1.0, "size_bytes": 9, "gates": [], "layers": []},
    }
    monkeypatch.setattr(tensorrt, "run_child", lambda job: answers[job["onnx"]])
    found = tensorrt._either({"onnx": "plain", "fused": "fused", "ends": ["a/pv"], "left": {}})
    assert found["attention"].written() == {"fused": 0, "of": 1, "reason": "crashed", "required": 0, "groups": []}
    assert tensorrt._either({"onnx": "fused", "fused": None, "ends": [], "left": {}}) == {"error": "crashed"}


def test_attentions_that_are_no_nodes_have_their_reasons(monkeypatch):
    built = {"library": "L", "version": "1", "seconds": 1.0, "size_bytes": 9, "gates": [], "layers": []}
    monkeypatch.setattr(tensorrt, "run_child", lambda job: built)
    left = {"a/pv": "its masks are too large for halves"}
    found = tensorrt._either({"onnx": "plain", "fused": None, "ends": ["a/pv", "b/pv"], "left": left})["attention"]
    assert found.reason == "1 of 2: no node: its masks are too large for halves"
    assert [group.nodes for group in found.groups] == [("a/pv",)]


def test_the_shapes_of_a_profile_are_bound_before_the_inspector_is_asked(built):
    plan = Plan(StandIn(), Device(Driver("90")), built[1][1].plan)
    unbound = inspected_layers(plan.engine.create_engine_inspector().get_engine_information(rtx.LayerInformationFormat.JSON))
    assert {name for layer in unbound for name in layer.inputs} == {"n/a"}
    assert {name for layer in inspected_layers(plan.information()) for name in layer.inputs} == {"int8", "fp32"}
    context = plan.engine.execution_context
    assert set(context.shapes.values()) == {(LARGEST, BUCKETS[-1])}
    assert float_precision(inspected_layers(plan.information())) == "fp32"
