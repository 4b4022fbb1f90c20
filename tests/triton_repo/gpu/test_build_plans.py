"""`build_plans.py` on machines with one, four and two kinds of GPUs: what it asks of TensorRT, what it measures, what it publishes."""

import json
import os

import onnx
import pytest
from tritonclient.grpc import model_config_pb2 as pb

from tests.export.tensorrt_stand_in import Driver
from tests.seldom import seldom
from tests.triton_repo.gpu.repositories import (
    LARGEST,
    NAME,
    ROWS,
    build,
    build_script,
    config,
    logits_of,
    quantized_graph,
    record_of,
    text_preprocessor,
    write,
)
from triton_repo.gpu.plans import Rival
from triton_repo.gpu.settings import Gpu, GpuGroup

pytestmark = pytest.mark.whole
MACHINES = {"one": ["90"], "four of a kind": ["89"] * 4, "two and two": ["80", "80", "90", "90"]}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return quantized_graph(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def floating(graph, tmp_path_factory):
    """The float model, with its weights in a file of their own."""
    path = tmp_path_factory.mktemp("float") / "half.onnx"
    onnx.save(onnx.load(graph.with_name("float.onnx")), path, save_as_external_data=True, location="half.onnx.data", size_threshold=0)
    return path


def repository(graph, out, **settings):
    preprocessor = text_preprocessor()
    write(out, graph, preprocessor, ROWS, logits_of(graph, preprocessor, ROWS), **settings)
    return out


def published(out, part="plan"):
    return config(out / "models" / f"{NAME}_{part}" / "config.pbtxt")


@pytest.mark.first(1)
@pytest.mark.parametrize("machine", seldom(MACHINES, ("four of a kind",)))
def test_one_plan_for_each_kind_and_instances_on_every_gpu(machine, graph, tmp_path):
    gpus = MACHINES[machine]
    out = repository(graph, tmp_path / "gpu", serving={"instances": 2, "max_queue_delay_us": 300, "response_cache": True})
    status, lines, stand_in = build(out, *gpus)
    assert status == 0, lines
    assert len(stand_in.built) == len(set(gpus))
    found = published(out)
    assert set(found.cc_model_filenames) == {f"{kind[:-1]}.{kind[-1]}" for kind in gpus}
    (group,) = found.instance_group
    assert (group.kind, group.count, list(group.gpus)) == (pb.ModelInstanceGroup.KIND_GPU, 2, [])
    assert found.dynamic_batching.max_queue_delay_microseconds == 300
    assert config(out / "models" / NAME / "config.pbtxt").response_cache.enable
    served = record_of(out)["serving"]
    assert [(row["gpu"], row["capability"], row["instances"]) for row in served["gpus"]] == [(i, kind, 2) for i, kind in enumerate(gpus)]
    rates = {kind: entry["rows_per_s"] for kind, entry in record_of(out)["plans"].items()}
    assert served["rows_per_s"] == pytest.approx(sum(rates[kind] for kind in gpus))


def graph_sizes(config):
    cuda = config.optimization.cuda
    assert cuda.graphs is bool(cuda.graph_spec)
    return [one.batch_size for one in cuda.graph_spec]


def test_a_plan_that_can_be_recorded_is_served_as_graphs(graph, floating, tmp_path):
    out = repository(graph, tmp_path / "gpu", rival=Rival(floating, "fp16"), serving={"batch_sizes": (3,)})
    status, lines, _ = build(out, "80", "90")
    assert status == 0, lines
    assert graph_sizes(published(out)) == [1, 2, 3, 4]
    for entry in record_of(out)["plans"].values():
        assert entry["graphs"] == {"used": True, "reason": None}
        assert entry["rival"]["graphs"]
        assert all(row["launched"]["n"] for row in entry["latency"])
    assert not any("CUDA graphs" in line for line in lines)


def test_graphs_are_left_out_where_they_are_not_wanted(graph, tmp_path):
    out = repository(graph, tmp_path / "gpu", serving={"cuda_graphs": False})
    status, lines, _ = build(out, "80")
    assert status == 0, lines
    assert graph_sizes(published(out)) == []
    entry = record_of(out)["plans"]["80"]
    assert entry["graphs"] == {"used": False, "reason": "gpu.cuda_graphs: false"}
    assert {row["launched"] for row in entry["latency"]} == {None}


def test_a_plan_that_cannot_be_recorded_is_served_kernel_by_kernel(graph, tmp_path, monkeypatch):
    out = repository(graph, tmp_path / "gpu")
    monkeypatch.setattr(Driver, "cuStreamEndCapture", lambda self, stream, handle: setattr(Driver, "recording", None) or 901)
    status, lines, _ = build(out, "80")
    assert status == 0, lines
    assert graph_sizes(published(out)) == []
    reason = record_of(out)["plans"]["80"]["graphs"]["reason"]
    assert reason.startswith("cuStreamEndCapture: ")
    assert f"  no CUDA graphs of the plan: {reason}" in lines
    assert published(out).cc_model_filenames


def test_graphs_that_answer_something_else_are_not_served(graph, tmp_path, monkeypatch):
    out = repository(graph, tmp_path / "gpu")
    monkeypatch.setattr(Driver, "cuGraphLaunch", lambda self, executable, stream: 0)  # the logits stay as they were spoilt
    status, lines, _ = build(out, "80")
    assert status == 0, lines
    assert graph_sizes(published(out)) == []
    assert record_of(out)["plans"]["80"]["graphs"]["reason"].startswith("recorded, its logits differ from the golden logits: ")
    assert graph_sizes_after_another_machine(out, monkeypatch) == []


def graph_sizes_after_another_machine(out, monkeypatch):
    """One configuration serves all machines: the plan of the first one is still listed."""
    monkeypatch.undo()
    status, lines, _ = build(out, "90")
    assert status == 0, lines
    assert record_of(out)["plans"]["90"]["graphs"]["used"]
    assert set(record_of(out)["plans"]) == {"80", "90"}
    return graph_sizes(published(out))


def test_explicit_gpus_and_replicas(graph, tmp_path):
    groups = (GpuGroup(gpus=(0, 1), instances=2), GpuGroup(gpus=(3,)))
    out = repository(graph, tmp_path / "gpu", gpu=Gpu(groups=groups))
    status, lines, stand_in = build(out, "80", "80", "89", "90")
    assert status == 0, lines
    assert set(record_of(out)["plans"]) == {"80", "90"}  # GPU 2 does not serve
    assert len(stand_in.built) == 2
    assert [(list(group.gpus), group.count) for group in published(out).instance_group] == [([0, 1], 2), ([3], 1)]


def test_a_gpu_that_is_not_there_is_named(graph, tmp_path):
    out = repository(graph, tmp_path / "gpu", gpu=Gpu(groups=(GpuGroup(gpus=(0, 4)),)))
    status, lines, _ = build(out, "80", "80")
    assert (status, lines) == (1, ["not ready: gpu.groups: GPU 4 is listed, and 2 GPUs are visible, 0 to 1; list those"])


def test_what_is_asked_of_the_builder(graph, tmp_path):
    gpu = Gpu(workspace_mb=512, optimization_level=5, hardware_compatibility="same_compute_capability", refit=True, timing_cache=False)
    out = repository(graph, tmp_path / "gpu", gpu=gpu)
    status, lines, stand_in = build(out, "86")
    assert status == 0, lines
    asked = stand_in.asked
    assert asked["MemoryPoolType.WORKSPACE"] == 512 * 10**6
    assert asked["builder_optimization_level"] == 5
    assert str(asked["hardware_compatibility_level"]).endswith("SAME_COMPUTE_CAPABILITY")
    assert asked["BuilderFlag.REFIT"]
    assert asked["BuilderFlag.DISABLE_TIMING_CACHE"]
    assert not list(out.glob("timing-cache*"))
    assert record_of(out)["plans"]["86"]["settings"]["optimization_level"] == 5


def test_nothing_is_asked_that_was_not_given_and_times_of_kernels_are_kept(graph, tmp_path):
    out = repository(graph, tmp_path / "gpu")
    _, _, stand_in = build(out, "86")
    assert set(stand_in.asked) == {"profiling_verbosity", "BuilderFlag.SPARSE_WEIGHTS"}
    assert (out / "timing-cache-sm86").exists()


def test_a_portable_plan_is_built_once_and_checked_on_every_kind(graph, tmp_path):
    out = repository(graph, tmp_path / "gpu", gpu=Gpu(hardware_compatibility="ampere_plus"))
    status, lines, stand_in = build(out, "90", "80")
    assert status == 0, lines
    assert len(stand_in.built) == 1
    assert dict(published(out).cc_model_filenames) == {"8.0": "ampere_plus.plan", "9.0": "ampere_plus.plan"}
    assert all(entry["parity"]["passed"] and entry["latency"] for entry in record_of(out)["plans"].values())
    status, lines, _ = build(out, "75", "80")
    assert status == 1
    assert "compute capability 75; it needs 80 or above" in lines[-1]
    build(out, "120")  # another file of that name: what it was on other machines is not known
    assert set(published(out).cc_model_filenames) == {"12.0"}


def test_the_plan_is_timed_beside_the_float_model_in_halves(graph, floating, tmp_path):
    out = repository(graph, tmp_path / "gpu", rival=Rival(floating, "fp16"), serving={"batch_sizes": (1, 2)})
    status, lines, stand_in = build(out, "89")
    assert status == 0, lines
    assert len(stand_in.built) == 2
    entry = record_of(out)["plans"]["89"]
    assert [(row["batch"], row["sequence"]) for row in entry["latency"]] == [(b, s) for s in (8, 16) for b in (1, 2, LARGEST)]
    for row in entry["latency"]:
        assert row["speedup"] == pytest.approx(row["rival"]["p50_ms"] / row["plan"]["p50_ms"], rel=1e-3)
    assert entry["rival"]["precision"] == "fp16"
    assert len(entry["rival"]["sha256"]) == 64
    assert [path.name for path in (out / "models" / f"{NAME}_plan" / "1").iterdir()] == ["sm89.plan"]  # it is not served
    with (out / "rival.onnx.data").open("ab") as file:
        file.write(b"\0")
    status, lines, _ = build(out, "89")
    assert (status, "rival.onnx has changed" in lines[-1]) == (1, True)


def test_without_a_float_model_there_is_a_reason_and_no_ratio(graph, tmp_path):
    out = repository(graph, tmp_path / "gpu")
    build(out, "89")
    entry = record_of(out)["plans"]["89"]
    assert entry["rival"] == {
        "precision": None,
        "sha256": None,
        "onnx_sha256": None,
        "graphs": False,
        "reason": "no float model in halves was exported",
    }
    assert {row["speedup"] for row in entry["latency"]} == {None}


def test_processes_are_measured_and_written_into_the_configurations(graph, tmp_path, monkeypatch):
    out = repository(graph, tmp_path / "gpu")
    script = build_script(out)
    monkeypatch.setitem(script.measured.__globals__, "rate", lambda work, rows: (work(rows[0]), 100.0)[1])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    spec = json.loads((out / "gpu.json").read_text())
    lines = []
    found = script.measured(out, spec, {0: ("80", 1), 1: ("80", 1)}, {"80": {"rows_per_s": 240.0}}, lines.append)
    assert (found["rows_per_s"], found["cores"]) == (480.0, 8)
    assert found["preprocess"] == {"processes": 5, "rows_per_s": 100.0}
    assert lines[0] == "preprocess: 5 processes (100 rows/s each, 480 rows/s on all GPUs, 8 cores)"
    build(out, "80")
    counts = record_of(out)["serving"]
    for part in ("preprocess", "postprocess"):
        (group,) = published(out, part).instance_group
        assert (group.kind, group.count) == (pb.ModelInstanceGroup.KIND_CPU, counts[part]["processes"])


def test_given_processes_are_not_measured(graph, tmp_path, monkeypatch):
    out = repository(graph, tmp_path / "gpu", gpu=Gpu(preprocess_processes=7, postprocess_processes=2))
    (out / "rows.json").unlink()  # nothing is tokenized
    status, lines, _ = build(out, "80")
    assert status == 0, lines
    assert record_of(out)["serving"]["preprocess"] == {"processes": 7, "rows_per_s": None}
    assert [published(out, part).instance_group[0].count for part in ("preprocess", "postprocess")] == [7, 2]


def test_missing_packages_are_named_with_the_way_to_install_them(graph, tmp_path):
    out = repository(graph, tmp_path / "gpu")
    file = out / "models" / f"{NAME}_preprocess" / "1" / "preprocess.py"
    file.write_text("import no_such_package\n" + file.read_text().replace("from __future__ import annotations\n", ""))
    status, lines, _ = build(out, "80")
    assert status == 1
    assert "No module named 'no_such_package'" in lines[-1]
    assert "pip install --no-index --no-deps wheels/*.whl" in lines[-1]
    assert not (out / "models" / f"{NAME}_plan" / "config.pbtxt").exists()


@pytest.mark.slow
def test_a_plan_of_other_settings_is_not_kept(graph, tmp_path):
    out = repository(graph, tmp_path / "gpu")
    build(out, "80")
    text = (out / "gpu.json").read_text()
    (out / "gpu.json").write_text(text.replace('"refit": false', '"refit": true'))
    build(out, "90")
    assert set(record_of(out)["plans"]) == {"90"}


def test_int8_share_counts_macs_and_claims_nothing_that_is_not_told(graph, tmp_path):
    out = repository(graph, tmp_path / "gpu")
    share = build_script(out).int8_share
    assert share({"a": 30, "b": 10}, {"a": "int8", "b": "fp16"}) == 0.75
    assert share({"a": 30, "b": 10}, {"a": "int8"}) is None
    assert share({}, {}) is None


def test_groups_list_each_gpu_once():
    with pytest.raises(ValueError, match="GPU 1 is listed more than once"):
        Gpu(groups=(GpuGroup(gpus=(0, 1)), GpuGroup(gpus=(1,))))
