"""What is measured where plans are built: samples, shapes, rates and numbers of processes, with a clock that is wound by hand."""

import numpy as np
import pytest

from triton_repo.gpu import measure_plans as measure
from triton_repo.gpu.plan_files import built_files, cpu_instances, cuda_graphs, file_names, graph_digest, read_rows, rows_text


class Clock:
    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def work(self, name, seconds):
        def once(*_):
            self.order.append(name)
            self.now += seconds

        return once


def test_plans_take_turns_after_a_warm_up_and_every_sample_is_its_own():
    clock = Clock()
    found = measure.in_turns({"plan": clock.work("a", 0.002), "rival": clock.work("b", 0.004)}, clock)
    assert found["plan"] == pytest.approx([0.002] * measure.MAX_SAMPLES)
    assert found["rival"] == pytest.approx([0.004] * measure.MAX_SAMPLES)
    changes = [name for index, name in enumerate(clock.order) if index == 0 or clock.order[index - 1] != name]
    assert changes == ["a", "b"] * measure.ROUNDS
    assert len(clock.order) == 2 * (measure.MAX_SAMPLES + measure.ROUNDS * measure.WARM_UP)


def test_a_slow_plan_is_sampled_as_often_as_is_asked_for_at_least():
    clock = Clock()
    found = measure.in_turns({"plan": clock.work("a", 2.0)}, clock)
    assert len(found["plan"]) == measure.MIN_SAMPLES


def test_quantiles_are_those_of_numpy_and_p99_needs_samples():
    seconds = np.random.default_rng(0).uniform(0.001, 0.01, 200)
    found = measure.quantiles(list(seconds))
    for key, value in {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99}.items():
        assert found[key] == pytest.approx(1000 * np.percentile(seconds, value), abs=1e-5)
    assert measure.quantiles(list(seconds[:199]))["p99_ms"] is None


class Timed:
    """A plan that needs a time for each row and token; remembers what lay on the GPU."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.shapes = clock, seconds, []

    def ready(self, features, *, graph=False):
        batch, sequence = features["input_ids"].shape
        self.shapes.append((batch, sequence))
        return self.clock.work("x", self.seconds * batch * sequence / (2 if graph else 1))


GOLDEN = {
    "8.input_ids": np.arange(24).reshape(3, 8),
    "8.logits": np.zeros((3, 2)),
    "16.input_ids": np.zeros((0, 16), np.int64),
    "16.logits": np.zeros((0, 2)),
}
SPEC = {"inputs": ["input_ids"], "dims": {"input_ids": ["int64", [-1]]}, "buckets": [8, 16], "batch_sizes": [1, 4]}


def test_every_shape_is_timed_largest_first_and_listed_smallest_first():
    clock = Clock()
    plan, rival = Timed(clock, 1e-5), Timed(clock, 3e-5)
    rows = measure.latencies({"plan": plan, "rival": rival}, GOLDEN, SPEC, clock=clock)
    assert [(row["batch"], row["sequence"]) for row in rows] == [(1, 8), (4, 8), (1, 16), (4, 16)]
    assert plan.shapes[0] == rival.shapes[0] == (4, 16)
    for row in rows:
        assert row["plan"]["p50_ms"] == pytest.approx(0.01 * row["batch"] * row["sequence"], rel=1e-3)
        assert row["speedup"] == pytest.approx(3, rel=1e-3)
    alone = measure.latencies({"plan": plan}, GOLDEN, SPEC, clock=clock)
    assert {(row["rival"], row["launched"], row["speedup"]) for row in alone} == {(None, None, None)}


def test_a_plan_that_runs_as_graphs_is_timed_kernel_by_kernel_too():
    clock = Clock()
    plans = {"plan": Timed(clock, 1e-5), "rival": Timed(clock, 3e-5)}
    for row in measure.latencies(plans, GOLDEN, SPEC, ["plan", "rival"], clock):
        assert row["plan"]["p50_ms"] == pytest.approx(0.005 * row["batch"] * row["sequence"], rel=1e-3)
        assert row["launched"]["p50_ms"] == pytest.approx(0.01 * row["batch"] * row["sequence"], rel=1e-3)
        assert row["speedup"] == pytest.approx(3, rel=1e-3)
    for row in measure.latencies(plans, GOLDEN, SPEC, ["plan"], clock):
        assert row["speedup"] == pytest.approx(6, rel=1e-3)


def test_rows_per_second_weigh_buckets_as_the_golden_rows_do():
    golden = {"8.logits": np.zeros((3, 2)), "16.logits": np.zeros((1, 2))}
    rows = [
        {"batch": batch, "sequence": sequence, "plan": {"p50_ms": ms}}
        for batch, sequence, ms in [(1, 8, 1.0), (4, 8, 2.0), (1, 16, 1.0), (4, 16, 8.0)]
    ]
    # naively: of 4 rows, three cost 2 ms / 4 each and one 8 ms / 4
    assert measure.plan_rate(rows, golden) == pytest.approx(4 / (3 * 0.0005 + 0.002))


def test_rows_of_a_shape_are_golden_rows_over_and_over_and_zeros_without_one():
    found = measure.features_of(GOLDEN, ["input_ids"], 8, 5, SPEC["dims"])["input_ids"]
    np.testing.assert_array_equal(found, GOLDEN["8.input_ids"][[0, 1, 2, 0, 1]])
    golden = {"16.input_ids": np.zeros((0, 16)), "16.attention_mask": np.zeros((0, 16))}
    dims = {"input_ids": ["int64", [-1]], "attention_mask": ["int64", [-1]]}
    made = measure.features_of(golden, list(dims), 16, 2, dims)
    assert made["input_ids"].shape == (2, 16)
    assert not made["input_ids"].any()
    assert made["attention_mask"].all()
    assert made["attention_mask"].dtype == np.int64
    picture = measure.features_of({"0.pixels": np.zeros((0, 3, 2, 2))}, ["pixels"], 0, 2, {"pixels": ["float32", [3, 2, 2]]})
    assert picture["pixels"].shape == (2, 3, 2, 2)


def test_rate_counts_rows_and_leaves_the_first_pass_out():
    clock = Clock()
    assert measure.rate(clock.work("r", 0.25), ["a", "b", "c"], clock) == pytest.approx(4)
    assert len(clock.order) == 3 + 4


@pytest.mark.parametrize(
    ("wanted", "one", "cores", "count"), [(1000, 300, 16, 4), (900, 300, 16, 3), (10, 300, 16, 1), (9000, 300, 16, 16)]
)
def test_processes_keep_up_with_the_gpus_within_the_cores(wanted, one, cores, count):
    assert measure.processes(wanted, one, cores) == count


def test_digest_of_a_graph_covers_its_external_weights(tmp_path):
    graph = tmp_path / "model.onnx"
    graph.write_bytes(b"graph")
    alone = graph_digest(graph)
    data = tmp_path / "model.onnx.data"
    data.write_bytes(b"weights")
    whole = graph_digest(graph)
    data.write_bytes(b"weighty")
    assert len({alone, whole, graph_digest(graph)}) == 3


@pytest.mark.parametrize("rows", [["a", "\u00e9\n"], [("a", "b"), ("c", "")], [b"\x89PNG\x00", b"\xff"]], ids=["texts", "pairs", "images"])
def test_rows_come_back_as_they_were(rows, tmp_path):
    (tmp_path / "rows.json").write_text(rows_text(rows))
    assert read_rows(tmp_path / "rows.json") == rows


def test_text_that_is_appended_to_a_configuration_parses():
    from triton_repo.config import from_text

    found = from_text('name: "m"\n' + cpu_instances(3) + file_names({"120": "sm120.plan", "80": "ampere_plus.plan"}))
    assert found.instance_group[0].count == 3
    assert dict(found.cc_model_filenames) == {"8.0": "ampere_plus.plan", "12.0": "sm120.plan"}
    graphs = from_text('name: "m"\n' + cuda_graphs([1, 4])).optimization.cuda
    assert graphs.graphs
    assert [(one.batch_size, dict(one.input), one.HasField("graph_lower_bound")) for one in graphs.graph_spec] == [
        (1, {}, False),
        (4, {}, False),
    ]
    assert cuda_graphs([]) == ""
    with pytest.raises(ValueError, match="two or three digits"):
        file_names({"80": '" inject'})


def test_a_record_of_an_earlier_version_is_named(tmp_path):
    assert built_files(tmp_path) == {}
    (tmp_path / "plans.json").write_text('{"80": {"file": "sm80.plan"}}')
    with pytest.raises(ValueError, match="earlier version: deploy the run again, and build the plans"):
        built_files(tmp_path)
