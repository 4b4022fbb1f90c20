import importlib.util
import json
import re
import shutil
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image
from tritonclient.grpc import model_config_pb2 as pb

from export.graph.attention import fuse_attention
from export.graph.onnx import export_float
from foundation.artifacts.artifact import digest, file_digest, files_below
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import RESPONSES
from tests.export import half_graphs
from tests.export import tiny_checkpoints as tiny
from tests.export.tensorrt_stand_in import Driver, StandIn
from tests.triton_repo.backend_stand_in import Tensor, TritonError, stand_in
from tests.triton_repo.gpu.repositories import (
    BUCKETS,
    LARGEST,
    NAME,
    PAIRS,
    ROWS,
    SCRIPTS,
    build,
    build_script,
    config,
    logits_of,
    quantized_graph,
    tensors,
    text_preprocessor,
    write,
)
from triton_repo import deployment

pytestmark = pytest.mark.whole


def png(seed: int) -> bytes:
    pixels, file = np.random.default_rng(seed).integers(0, 256, (9, 14, 3), np.uint8), BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return quantized_graph(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def written(graph, tmp_path):
    preprocessor, out = text_preprocessor(), tmp_path / "gpu"
    logits = logits_of(graph, preprocessor, ROWS)
    figures = write(out, graph, preprocessor, ROWS, logits)
    return out, preprocessor, figures


# --- the repository as written


def test_layout_and_that_nothing_is_ready(written):
    out, _, figures = written
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    python = [
        f"models/{NAME}_{part}/{file}"
        for part in ("postprocess", "preprocess")
        for file in ("1/long_text.py", "1/model.py", "1/preprocess.json", "1/preprocess.py", "1/response.py", "1/tokenizer.json")
    ]
    scripts = ["README.md", "golden.npz", "rows.json", "gpu.json", "model.onnx", "plan.pbtxt", "preprocess.pbtxt", "postprocess.pbtxt"]
    warm_up = [f"models/{NAME}_plan/warmup/{bucket}.{name}" for bucket in BUCKETS for name in text_preprocessor().input_names]
    assert files == sorted([*python, *scripts, *SCRIPTS, *warm_up, f"models/{NAME}/1/.keep", f"models/{NAME}/config.pbtxt"])
    assert (figures.layout, figures.models) == ("ensemble", (NAME, f"{NAME}_plan", f"{NAME}_postprocess", f"{NAME}_preprocess"))


def test_configurations_fit_the_graph_the_profiles_and_each_other(written, graph):
    out, preprocessor, _ = written
    ensemble = config(out / "models" / NAME / "config.pbtxt")
    before, plan, after = (config(out / f"{part}.pbtxt") for part in ("preprocess", "plan", "postprocess"))
    inputs = onnx.load(str(graph)).graph.input
    assert tensors(plan.input) == {value.name: (pb.TYPE_INT64, [-1]) for value in inputs} == tensors(before.output)
    assert tensors(plan.output) == {"logits": (pb.TYPE_FP32, [len(preprocessor.labels)])} == tensors(after.input)
    assert tensors(ensemble.input) == {"TEXT": (pb.TYPE_STRING, [1])} == tensors(before.input)
    assert tensors(ensemble.output) == tensors(after.output) | {"LOGITS": tensors(plan.output)["logits"]}
    assert {value.max_batch_size for value in (ensemble, before, plan, after)} == {LARGEST}
    assert [step.model_name for step in ensemble.ensemble_scheduling.step] == [before.name, plan.name, after.name]
    made = set(tensors(ensemble.input))
    for step, model in zip(ensemble.ensemble_scheduling.step, (before, plan, after), strict=True):
        assert set(step.input_map) == set(tensors(model.input))
        assert set(step.input_map.values()) <= made
        assert set(step.output_map) == set(tensors(model.output))
        made |= set(step.output_map.values())
    assert set(tensors(ensemble.output)) <= made


def test_plan_runs_on_every_gpu_with_all_profiles_and_batches(written):
    plan = config(written[0] / "plan.pbtxt")
    (group,) = plan.instance_group
    assert (group.kind, group.count, list(group.profile), list(group.gpus)) == (pb.ModelInstanceGroup.KIND_GPU, 1, ["0", "1"], [])
    assert plan.platform == "tensorrt_plan"
    assert plan.HasField("dynamic_batching")
    assert not plan.default_model_filename
    shapes = [(warm.batch_size, list(warm.inputs["input_ids"].dims)) for warm in plan.model_warmup]
    assert shapes == [(1, [8]), (LARGEST, [8]), (1, [16]), (LARGEST, [16])]


def test_pairs_have_two_inputs(graph, tmp_path):
    preprocessor = text_preprocessor()
    logits = logits_of(graph, preprocessor, PAIRS)
    write(tmp_path / "gpu", graph, preprocessor, PAIRS, logits, 2)
    assert list(tensors(config(tmp_path / "gpu/models" / NAME / "config.pbtxt").input)) == ["TEXT", "TEXT_PAIR"]


def test_golden_arrays_hold_every_row_once_in_its_bucket(written, graph):
    out, preprocessor, _ = written
    golden = np.load(out / "golden.npz", allow_pickle=False)
    groups = preprocessor.groups(ROWS)
    session = onnxruntime.InferenceSession(str(graph))
    for bucket in BUCKETS:
        assert golden[f"{bucket}.input_ids"].shape == (len(groups[bucket]), bucket)
        features = {name: golden[f"{bucket}.{name}"] for name in preprocessor.input_names}
        np.testing.assert_allclose(session.run(["logits"], features)[0], golden[f"{bucket}.logits"], atol=1e-5)


def test_a_bucket_without_rows_is_checked_with_shorter_ones(graph, tmp_path):
    preprocessor, rows = text_preprocessor(), ["a fine film", "dull"]
    logits = logits_of(graph, preprocessor, rows)
    write(tmp_path / "gpu", graph, preprocessor, rows, logits)
    golden = np.load(tmp_path / "gpu" / "golden.npz")
    np.testing.assert_array_equal(golden["16.logits"], logits)
    assert golden["16.input_ids"].shape == (2, 16)
    session = onnxruntime.InferenceSession(str(graph))
    found = session.run(["logits"], {name: golden[f"16.{name}"] for name in preprocessor.input_names})[0]
    np.testing.assert_allclose(found, logits, atol=0.02)  # padding changes nothing but roundings
    assert build(tmp_path / "gpu", "90")[0] == 0


def test_a_graph_that_does_not_fit_is_refused(graph, tmp_path):
    preprocessor = text_preprocessor()
    names = ("input_ids", "attention_mask")
    other = Preprocessor("text", names, ("a", "b"), preprocessor.task, 16, BUCKETS, tokenizer=preprocessor.tokenizer)
    with pytest.raises(ValueError, match=r"model\.onnx: its inputs are"):
        write(tmp_path / "gpu", graph, other, ROWS, np.zeros((7, 2), np.float32), 2)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    preprocessor = tiny.write(folder / "float", "vit")
    return export_float(Checkpoint(folder / "float"), preprocessor, folder / "model.onnx"), preprocessor


def test_images(vit, tmp_path):
    graph, preprocessor = vit
    rows = [png(seed) for seed in range(5)]
    logits = logits_of(graph, preprocessor, rows)
    out = tmp_path / "gpu"
    write(out, graph, preprocessor, rows, logits, LARGEST)
    plan = config(out / "plan.pbtxt")
    assert tensors(plan.input) == {"pixel_values": (pb.TYPE_FP32, [3, 12, 12])}
    assert list(plan.instance_group[0].profile) == ["0"]
    assert list(plan.model_warmup[0].inputs["pixel_values"].dims) == [3, 12, 12]
    assert (out / f"models/{NAME}_plan/warmup/image.pixel_values").stat().st_size == 3 * 12 * 12 * 4
    assert list(tensors(config(out / "models" / NAME / "config.pbtxt").input)) == ["IMAGE"]
    lines = []
    assert build_script(out).run(out, StandIn(), Driver("90"), lines.append) == 0, lines


def test_images_of_no_fixed_size_are_refused(vit, tmp_path):
    graph, preprocessor = vit
    free = {**preprocessor.image, "size": {"shortest_edge": 12}}
    other = Preprocessor("image", ("pixel_values",), ("a", "b", "c"), "image-classification", image=free)
    with pytest.raises(ValueError, match="to a fixed size"):
        write(tmp_path / "gpu", graph, other, [png(0)], np.zeros((1, 3), np.float32), 2)


# --- build_plans.py, run as the copy in the repository


def load(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_scripts_need_nothing_but_numpy_and_tensorrt(written):
    out, _, _ = written
    allowed = set(sys.stdlib_module_names) | {"numpy", "tensorrt", *(name.removesuffix(".py") for name in SCRIPTS)}
    for file in SCRIPTS:
        source = re.sub(r"^if TYPE_CHECKING:.*\n(    .*\n)+", "", (out / file).read_text(), flags=re.M)
        assert set(re.findall(r"^\s*(?:from|import) (\w+)", source, re.M)) <= allowed


def test_build_publishes_one_plan_per_capability(written):
    out, _, _ = written
    status, lines, stand_in = build(out, "90", "80", "90")
    assert status == 0, lines
    model = out / "models" / f"{NAME}_plan"
    published = config(model / "config.pbtxt")
    assert dict(published.cc_model_filenames) == {"8.0": "sm80.plan", "9.0": "sm90.plan"}
    assert sorted(path.name for path in (model / "1").iterdir()) == ["sm80.plan", "sm90.plan"]
    assert [built["profiles"] for built in stand_in.built] == [len(BUCKETS)] * 2
    published.ClearField("cc_model_filenames")
    published.ClearField("optimization")
    assert published == config(out / "plan.pbtxt")
    record = json.loads((out / "plans.json").read_text())["plans"]
    spec = json.loads((out / "gpu.json").read_text())
    assert len(spec["int8_gemms"]) == 12
    assert set(record) == {"80", "90"}
    for entry in record.values():
        assert entry["parity"]["passed"]
        assert entry["parity"]["batches"]["n"] == len(ROWS)
        assert entry["parity"]["single"]["n"] == sum(min(4, len(members)) for members in text_preprocessor().groups(ROWS).values())
        assert entry["int8_gemms"] == 12
    assert not (out / "staging").exists()


def test_a_plan_with_wrong_answers_is_not_published_and_retracts_the_last(written):
    out, _, _ = written
    assert build(out, "90")[0] == 0
    status, lines, _ = build(out, "90", spoil=lambda logits, batch: logits[:, ::-1])
    assert status == 1
    assert "differ from the golden logits" in lines[-1]
    assert not (out / "models" / f"{NAME}_plan" / "config.pbtxt").exists()
    assert not (out / "staging").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda logits, batch: logits[:, ::-1] if batch == 1 else logits, id="wrong alone", marks=pytest.mark.slow),
        pytest.param(lambda logits, batch: logits[:, ::-1] if batch > 1 else logits, id="wrong in batches"),
        pytest.param(lambda logits, batch: logits + np.float32(0.03), id="off by 0.03"),
        pytest.param(
            lambda logits, batch: np.where(np.arange(batch)[:, None] == 0, np.float32("nan"), logits),
            id="not a number",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ways_to_be_wrong(written, spoil):
    assert build(written[0], "90", spoil=spoil)[0] == 1


def test_small_differences_are_accepted(written):
    assert build(written[0], "90", spoil=lambda logits, batch: logits + np.float32(0.01))[0] == 0


def test_plans_of_other_machines_are_kept_while_they_fit(written):
    out, _, _ = written
    build(out, "80")
    build(out, "89")
    model = out / "models" / f"{NAME}_plan"
    assert set(config(model / "config.pbtxt").cc_model_filenames) == {"8.0", "8.9"}
    record = json.loads((out / "plans.json").read_text())
    record["plans"]["80"]["tensorrt"] = "10.0"
    (out / "plans.json").write_text(json.dumps(record))
    build(out, "120")
    assert set(config(model / "config.pbtxt").cc_model_filenames) == {"8.9", "12.0"}


def test_nothing_is_built_inside_a_run(written):
    out, _, _ = written
    (out.parent / "manifest.json").touch()
    before = sorted(out.rglob("*"))
    status, lines, _ = build(out, "90")
    (out.parent / "manifest.json").unlink()
    assert (status, len(lines)) == (1, 1)
    assert "copy it out first: compress deploy RUN DIR" in lines[0]
    assert sorted(out.rglob("*")) == before


def test_what_is_built_belongs_to_a_deployment(written, tmp_path):
    """Plans that the record lists by their sha256 are expected; a changed one, and any other file, is not."""
    root = tmp_path / "deployed"
    shutil.copytree(written[0], root / "model_repository", ignore=shutil.ignore_patterns("__pycache__"))
    files = {name: {"sha256": file_digest(path)} for name, path in files_below(root).items()}
    (root / "deployment.json").write_text(json.dumps({"schema": 1, "files": files, "digest": digest(files), "owner": {}}))
    assert deployment.problems(root) == []
    status, lines, _ = build(root / "model_repository", "90")
    assert status == 0, lines
    assert deployment.problems(root) == []
    [plan] = root.rglob("sm90.plan")
    plan.write_bytes(b"other")
    (plan.parent / "sm80.plan").touch()
    assert [str(problem).removeprefix(f"{plan.parent}/") for problem in deployment.problems(root)] == [
        "sm90.plan: changed",
        "sm80.plan: not in deployment.json",
    ]


def test_without_a_gpu_it_says_so(written):
    status, lines, _ = build(written[0])
    assert status == 1
    assert "--gpus all" in lines[0]


def test_a_changed_graph_is_refused(written):
    out, _, _ = written
    with (out / "model.onnx").open("ab") as file:
        file.write(b"\0")
    status, lines, _ = build(out, "90")
    assert status == 1
    assert "has changed" in lines[0]


def test_regressions_are_judged_in_standard_deviations(written):
    compared = build_script(written[0]).compared
    expected = np.array([[0.0], [5.0], [1.0], [4.0]])
    assert compared(expected, expected + 0.03, 2.0, "fp32")["passed"]
    assert not compared(expected, expected + 0.05, 2.0, "fp32")["passed"]


def test_readme_names_the_models_and_what_was_not_run(written):
    text = (written[0] / "README.md").read_text()
    assert "@" not in text.replace('"@', "")
    assert f"/v2/models/{NAME}/infer" in text
    assert "None of the commands above was run" in text


# --- the python models, with a stand-in for the server's module


@pytest.fixture
def python_models(written, monkeypatch):
    """Loads the copied models: preprocess and postprocess."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in())
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda out: [_model(out, part) for part in ("preprocess", "postprocess")]


def _model(out: Path, part: str):
    from google.protobuf import json_format

    folder, given = out / "models" / f"{NAME}_{part}", config(out / f"{part}.pbtxt")
    for module in ("preprocess", "long_text"):
        sys.modules.pop(module, None)
    model = load(folder / "1" / "model.py", f"model_{part}").TritonPythonModel()
    for module in ("preprocess", "long_text"):
        sys.modules.pop(module, None)
    model.initialize({"model_config": json_format.MessageToJson(given, preserving_proto_field_name=True)})
    return model


def request(**columns):
    return {name: Tensor(name, np.array([[value] for value in values], dtype=object)) for name, values in columns.items()}


def test_python_models_answer_like_the_preprocessor(written, python_models, graph):
    out, preprocessor, _ = written
    before, after = python_models(out)
    batches = [ROWS[:3], ROWS[3:4], ROWS[4:]]
    responses = before.execute([request(TEXT=[row.encode() for row in rows]) for rows in batches])
    session = onnxruntime.InferenceSession(str(graph))
    for rows, response in zip(batches, responses, strict=True):
        expected = preprocessor.encode(rows)
        assert set(response.tensors) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(response.tensors[name], array)
            assert response.tensors[name].dtype == np.int64
        logits = session.run(["logits"], response.tensors)[0]
        (answer,) = after.execute([{"logits": Tensor("logits", logits)}])
        wanted = RESPONSES[preprocessor.response].of(logits, preprocessor.labels)
        assert {name: array.tolist() for name, array in answer.tensors.items()} == {
            name: wanted[name].tolist() for name in ("LABEL", "SCORE")
        }
        assert answer.tensors["SCORE"].dtype == np.float32


def test_a_bad_row_fails_alone(written, python_models):
    before, _ = python_models(written[0])
    good, bad = before.execute([request(TEXT=[b"a film"]), request(TEXT=[b"\xff\xfe"])])
    assert good.error is None
    assert bad.error.code == TritonError.INVALID_ARG


def test_pairs_reach_the_preprocessor(graph, tmp_path, python_models):
    preprocessor, out = text_preprocessor(), tmp_path / "pairs"
    write(out, graph, preprocessor, PAIRS, logits_of(graph, preprocessor, PAIRS), 2)
    before, _ = python_models(out)
    columns = {"TEXT": [first.encode() for first, _ in PAIRS], "TEXT_PAIR": [second.encode() for _, second in PAIRS]}
    (response,) = before.execute([request(**columns)])
    for name, array in preprocessor.encode(PAIRS).items():
        np.testing.assert_array_equal(response.tensors[name], array)


def test_images_reach_the_preprocessor(vit, tmp_path, python_models):
    graph, preprocessor = vit
    out, rows = tmp_path / "images", [png(1), png(2)]
    write(out, graph, preprocessor, rows, logits_of(graph, preprocessor, rows), 2)
    before, _ = python_models(out)
    (response,) = before.execute([request(IMAGE=rows)])
    np.testing.assert_array_equal(response.tensors["pixel_values"], preprocessor.encode(rows)["pixel_values"])
    (bad,) = before.execute([request(IMAGE=[b"no image"])])
    assert "not a readable image" in str(bad.error)


def test_repository_can_be_moved(written, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.move(written[0], moved)
    assert build(moved, "90")[0] == 0


# --- plans whose float part is in halves


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """A half graph of a quantized BERT with heads of 32, the same with attention as nodes, and the Q/DQ graph that they are made of."""
    source, folder = half_graphs.quantized("ragged"), tmp_path_factory.mktemp("halved")
    made = half_graphs.halved(source).model
    paths = folder / "plain.onnx", folder / "plain_fused.onnx"
    onnx.save(made, str(paths[0]))
    single = "bert.encoder.layer.1.attention.self/attention"  # no kernel passes the gate
    onnx.save(fuse_attention(made, {}, {single: "no kernel"}).model, str(paths[1]))
    return *paths, source


def half_repository(halved, out: Path, fused: Path | None = None) -> Path:
    plain, source = halved[0], halved[2]
    preprocessor = text_preprocessor()
    names = ("input_ids", "attention_mask")
    given = Preprocessor("text", names, preprocessor.labels, preprocessor.task, BUCKETS[-1], BUCKETS, tokenizer=preprocessor.tokenizer)
    logits = logits_of(source, given, ROWS)
    if fused is not None:
        plain = Path(shutil.copy(plain, fused.with_name(fused.name.replace("_fused", ""))))
    write(out, plain, given, ROWS, logits, LARGEST)
    return out


def built_half(out: Path, spoil=lambda logits, batch: logits):
    status, lines, _ = build(out, "89", spoil=spoil)
    return status, lines, json.loads((out / "plans.json").read_text())["plans"]["89"] if status == 0 else None


def test_a_half_plan_is_built_from_the_graph_with_attention_nodes_and_recorded(halved, tmp_path):
    out = half_repository(halved, tmp_path / "gpu")
    spec = json.loads((out / "gpu.json").read_text())
    assert (spec["float_precision"], spec["fused"], len(spec["attentions"])) == ("fp16", "model_fused.onnx", 2)
    assert spec["fused_sha256"] == file_digest(out / "model_fused.onnx")
    assert len(spec["int8_gemms"]) == 13  # the products behind casts count
    status, lines, record = built_half(out)
    assert status == 0, lines
    assert record["float_precision"] == "fp16"
    assert record["int8_gemms"] == 13
    assert record["attention"] == {"fused": 1, "of": 2, "reason": "some attentions are no nodes of the graph: no kernel runs them"}
    assert record["parity"]["batches"]["median_limit"] == 0.05


@pytest.mark.slow
def test_where_the_graph_with_attention_nodes_does_not_build_the_other_is_and_says_why(halved, tmp_path):
    everything = tmp_path / "everything_fused.onnx"
    onnx.save(fuse_attention(onnx.load(str(halved[0])), {}).model, str(everything))  # a single head fails the gate
    out = half_repository(halved, tmp_path / "gpu", fused=everything)
    status, lines, record = built_half(out)
    assert status == 0, lines
    assert any(line.startswith("attention is not fused:") for line in lines)
    assert (record["attention"]["fused"], "dedicated kernel" in record["attention"]["reason"]) == (0, True)


@pytest.mark.first(1)
@pytest.mark.parametrize(("moved", "status"), [(0.03, 0), (0.07, 1)])
def test_halves_are_held_to_their_own_limits(halved, tmp_path, moved, status):
    """0.03 is too much for fp32; see `test_ways_to_be_wrong`."""
    out = half_repository(halved, tmp_path / "gpu")
    assert built_half(out, lambda logits, batch: logits + np.float32(moved))[0] == status


def test_a_changed_graph_with_attention_nodes_is_refused(halved, tmp_path):
    out = half_repository(halved, tmp_path / "gpu")
    with (out / "model_fused.onnx").open("ab") as file:
        file.write(b"\0")
    status, lines, _ = built_half(out)
    assert (status, "model_fused.onnx has changed" in lines[0]) == (1, True)
