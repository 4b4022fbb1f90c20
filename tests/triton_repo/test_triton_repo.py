import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import GPT2Config

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.labels.classes import ClassIds
from foundation.measure.answers import save_predictions
from foundation.stage.context import Context
from foundation.standalone.response import RESPONSES
from tests.problems import raises_problem
from tests.told import Told
from tests.triton_repo import tiny_exports as tiny
from triton_repo import environment, layout
from triton_repo.client import Answers, ServedWrong
from triton_repo.config import from_text
from triton_repo.gpu.plan_files import SCHEMA
from triton_repo.gpu.settings import Gpu
from triton_repo.serving import server_of
from triton_repo.triton_repo import TritonRepo, compare


def context(rows, folder: Path, **target) -> Context:
    data = SimpleNamespace(labels=(), evaluation=SimpleNamespace(rows=rows, labels=ClassIds(np.zeros(len(rows), np.int64))))
    return Context("text-classification", data, 16, Target(**target), 0, Told(), folder)


@pytest.mark.parametrize(
    ("device", "engines", "problem"),
    [
        ("cuda", ("torch_kernels",), None),
        ("cuda", ("torch_kernels", "tensorrt"), "tensorrt given"),
        ("cuda", ("openvino",), "cuda given"),
        ("cpu", ("openvino", "torch_kernels"), None),
        ("cpu", ("openvino", "tensorrt"), "tensorrt given"),
    ],
)
def test_a_gpu_serves_vectors_on_our_kernels_alone(device, engines, problem, tmp_path):
    given = replace(context([], tmp_path, device=device, engines=engines), task="sentence-embedding")
    if problem is None:
        TritonRepo().check(None, None, given)
    else:
        with pytest.raises(InputError, match=f"{problem}.*vectors"):
            TritonRepo().check(None, None, given)


def test_tags_are_served_by_no_gpu(tmp_path):
    given = replace(context([], tmp_path, device="cuda", engines=("torch_kernels",)), task="token-classification")
    with pytest.raises(InputError, match=r"cuda given.*tags"):
        TritonRepo().check(None, None, given)


@pytest.mark.parametrize("runs", [True, False])
def test_on_a_gpu_vectors_have_the_repository_of_our_kernels_or_none(runs, tmp_path):
    (tmp_path / "export" / "quantize-int8").mkdir(parents=True)
    vectors = {"labels": ("vector",), "task": "sentence-embedding", "response": "vector", "dimensions": 4}
    replace(tiny.text_preprocessor(), **vectors).save(tmp_path / "export" / "quantize-int8")
    (tmp_path / "export" / "quantize-int8" / "plan").write_bytes(b"a plan")
    entry = {"engine": "torch_kernels", "mode": "packed", "float_precision": "fp32", "file": "quantize-int8/plan", "runnable": runs}
    build = {"variant": "quantize", "precision": "int8", "float_precision": "fp32", "folder": "quantize-int8", "engines": [entry]}
    (tmp_path / "export" / "export.json").write_text(json.dumps({"schema": 1, "builds": [build]}))
    given = replace(context(tiny.TEXTS, tmp_path, device="cuda", engines=("torch_kernels",)), task="sentence-embedding")
    (tmp_path / "out").mkdir()
    if not runs:
        with pytest.raises(InputError, match="torch_kernels runs no build"):
            TritonRepo().run(Artifact(tmp_path / "export", {}), given, tmp_path / "out")
        return
    TritonRepo().run(Artifact(tmp_path / "export", {}), given, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "triton.json").read_text())
    assert (document.get("models", []), document["kernels"]["model"]) == ([], "quantize-int8")
    assert not (tmp_path / "out" / "model_repository").exists()
    assert (tmp_path / "out" / "model_repository_kernels" / "quantize-int8" / "config.pbtxt").exists()


@pytest.fixture
def no_server(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "nowhere"))


def test_writing_needs_no_server(tmp_path, no_server):
    exported = tiny.export(tmp_path / "export", tiny.text_preprocessor(), tiny.TEXTS)
    (tmp_path / "out").mkdir()
    stage, given = TritonRepo(serve=False), context(tiny.TEXTS, tmp_path)
    assert stage.depends(given) is None
    figures = stage.run(exported, given, tmp_path / "out")
    assert figures == {"models": [{"model": "baseline-fp32", "metrics": {}, "disagreements": None}]}
    [model] = json.loads((tmp_path / "out" / "triton.json").read_text())["models"]
    assert (model["reason"], model["predictions"], model["latency"]) == ("serve: false", None, [])
    assert (tmp_path / "out" / "model_repository" / "baseline-fp32" / "config.pbtxt").exists()


def test_an_engine_on_our_kernels_has_a_repository_of_its_own(tmp_path, no_server):
    exported = tiny.export(tmp_path / "export", tiny.text_preprocessor(), tiny.TEXTS, (("baseline", "fp32"), ("quantize", "int8")))
    document = json.loads((tmp_path / "export" / "export.json").read_text())
    (tmp_path / "export" / "quantize-int8" / "plan").write_bytes(b"a plan")
    entry = {"engine": "torch_kernels", "mode": "packed", "float_precision": "fp32", "file": None, "runnable": False}
    document["builds"][0]["engines"].append(entry)
    (tmp_path / "export" / "export.json").write_text(json.dumps(document))
    for runs in (False, True):
        out = tmp_path / f"out-{runs}"
        out.mkdir()
        if runs:
            document["builds"][1]["engines"].append({**entry, "file": "quantize-int8/plan", "runnable": True})
            (tmp_path / "export" / "export.json").write_text(json.dumps(document))
        TritonRepo(serve=False, instances=2).run(exported, context(tiny.TEXTS, tmp_path, batch_sizes=(1, 16)), out)
        told, folder = json.loads((out / "triton.json").read_text()), out / "model_repository_kernels"
        assert ("kernels" in told) == folder.exists() == runs
    assert (told["kernels"]["model"], told["kernels"]["engine"], told["kernels"]["metrics"]) == ("quantize-int8", "torch_kernels", {})
    assert told["kernels"]["reason"].startswith("written, not run")
    config = (folder / "quantize-int8" / "config.pbtxt").read_text()
    assert "max_batch_size: 16" in config
    assert "KIND_GPU" in config
    assert (folder / "quantize-int8" / "1" / "plan.safetensors").read_bytes() == b"a plan"


def on_kernels(root: Path, *precisions: str) -> Artifact:
    """An export with a decoder that our kernels run, without any weight."""
    builds, names = [], {"engine": "torch_kernels_decoder", "mode": "packed", "runnable": True}
    for variant in ("first", "last"):
        folder = root / f"{variant}-int8" / "torch-kernels-decoder"
        folder.mkdir(parents=True)
        (folder / "plan.safetensors").write_bytes(variant.encode())
        GPT2Config(vocab_size=50, n_positions=24, bos_token_id=1, eos_token_id=2).save_pretrained(folder)
        file = f"{variant}-int8/torch-kernels-decoder/plan.safetensors"
        engines = [{**names, "float_precision": floating, "file": file} for floating in precisions]
        builds.append({"variant": variant, "precision": "int8", "folder": f"{variant}-int8", "engines": engines})
    (root / "export.json").write_text(json.dumps({"schema": 1, "builds": builds}))
    return Artifact(root, {"id": "export", "digest": "0"})


def test_a_decoder_on_our_kernels_is_all_that_a_gpu_serves_of_a_language_model(tmp_path, no_server):
    given = replace(
        context(tiny.TEXTS, tmp_path, device="cuda", engines=("torch_kernels_decoder",), batch_sizes=(1, 16)), task="text-generation"
    )
    out = tmp_path / "out"
    out.mkdir()
    stage = TritonRepo(max_waiting=7)
    assert stage.depends(given) is None
    assert stage.run(on_kernels(tmp_path / "export", "fp16", "fp32"), given, out) == {"models": []}
    assert sorted(path.name for path in out.iterdir()) == ["model_repository_kernels", "triton.json"]
    told = json.loads((out / "triton.json").read_text())["kernels"]
    assert (told["model"], told["engine"], told["mode"], told["float_precision"]) == (
        "last-int8",
        "torch_kernels_decoder",
        "packed",
        "fp16",  # the recommended mode is listed first
    )
    assert (told["metrics"], told["reason"].startswith("written, not run")) == ({}, True)
    folder = out / "model_repository_kernels" / "last-int8"
    config = from_text((folder / "config.pbtxt").read_text())
    values = {name: config.parameters[name].string_value for name in ("max_running", "max_waiting", "context", "vocabulary", "properties")}
    assert values == {
        "max_running": "16",
        "max_waiting": "7",
        "context": "24",
        "vocabulary": "50",
        "properties": '{"float_precision": "fp16"}',
    }
    assert (folder / "1" / "kernels" / "plan.safetensors").read_bytes() == b"last"
    with pytest.raises(InputError, match=r"model_repository_kernels: this repository is for GPUs .* NVIDIA's container"):
        server_of(out / "model_repository", tmp_path / "log")
    (tmp_path / "none").mkdir()
    with raises_problem("target.engines", "torch_kernels_decoder runs no build", "export.json"):
        stage.run(on_kernels(tmp_path / "empty"), given, tmp_path / "none")


def test_what_is_served_is_part_of_the_cache_key(tmp_path, no_server):
    exported = tiny.export(tmp_path / "export", tiny.text_preprocessor(), tiny.TEXTS, (("baseline", "fp32"), ("quantize", "int8")))
    document = json.loads((tmp_path / "export" / "export.json").read_text())
    for build in document["builds"]:
        build["engines"][1] |= {"metrics": {"accuracy": 0.9}, "size_bytes": 10}
    (tmp_path / "export" / "export.json").write_text(json.dumps(document))
    digests = {"baseline": "a", "quantize": "b"}
    checkpoints = {
        name: Artifact(tmp_path, {"id": name, "digest": digests[name], "parents": ["a"] * (name != "baseline")}) for name in digests
    }
    save_predictions(
        tmp_path / "torch.safetensors", tiny.expected(tiny.text_preprocessor(), tiny.TEXTS), ClassIds(np.zeros(len(tiny.TEXTS), np.int64))
    )

    def chosen(int8_ms: float, **target) -> tuple:
        times = {("baseline", "fp32"): 2.0, ("quantize", "int8"): int8_ms}
        names = {"float_precision": "fp32", "engine": "openvino", "mode": "static", "batch": 1, "sequence": 32, "throughput_per_s": 1}
        rows = [{"variant": name, "precision": kind, "p50_ms": time, **names} for (name, kind), time in times.items()]
        (tmp_path / "latency.json").write_text(json.dumps(rows))
        measured = {"exported": exported, "latency": Artifact(tmp_path, {}), "checkpoints": checkpoints}
        given = replace(context(tiny.TEXTS, tmp_path, **target), predictions={"baseline": tmp_path / "torch.safetensors"}, **measured)
        out = tmp_path / f"out-{int8_ms}-{len(target)}"
        out.mkdir()
        TritonRepo(serve=False).run(exported, given, out)
        return TritonRepo(serve=False).depends(given), json.loads((out / "triton.json").read_text())["chosen"]

    fast, slow, first = chosen(1.0), chosen(3.0), chosen(3.0, serve="first")
    assert (fast[1], slow[1], first[1]) == ("quantize-int8", "baseline-fp32", None)
    assert fast[0]["chosen"][0]["variant"] == "quantize"
    assert slow[0]["chosen"][0]["variant"] == "baseline"
    assert first[0] is None


def test_without_the_server_the_cache_key_already_says_so(tmp_path, no_server):
    with pytest.raises(InputError, match="run `compress doctor --fix`"):
        TritonRepo().depends(context(tiny.TEXTS, tmp_path))


def test_pairs_are_seen_in_the_data(tmp_path, no_server):
    exported = tiny.export(tmp_path / "export", tiny.text_preprocessor(), tiny.PAIRS)
    (tmp_path / "out").mkdir()
    TritonRepo(serve=False).run(exported, context(tiny.PAIRS, tmp_path), tmp_path / "out")
    assert "TEXT_PAIR" in (tmp_path / "out" / "model_repository" / "baseline-fp32" / "config.pbtxt").read_text()


@pytest.fixture
def model(tmp_path):
    return layout.served_models(tiny.export(tmp_path, tiny.text_preprocessor(), tiny.TEXTS))[0]


def answers(logits: np.ndarray) -> Answers:
    outputs = RESPONSES["label"].of(logits, tiny.LABELS)
    return Answers(outputs.pop("LOGITS"), outputs)


def test_equal_answers(model):
    logits = tiny.expected(tiny.text_preprocessor(), tiny.TEXTS)
    found = compare(model, "text-classification", answers(logits), ClassIds(np.zeros(len(logits), np.int64)))
    assert (found.disagreements, found.median_abs, found.max_abs) == (0, 0.0, 0.0)


def test_one_flip_is_counted(model):
    logits = tiny.expected(tiny.text_preprocessor(), tiny.TEXTS)
    logits[2] = np.roll(logits[2], 1)
    found = compare(model, "text-classification", answers(logits), ClassIds(np.zeros(len(logits), np.int64)))
    assert (found.disagreements, found.median_abs) == (1, 0.0)
    assert found.max_abs > 0


def test_more_flips_fail_and_name_the_first_row(model):
    logits = np.roll(tiny.expected(tiny.text_preprocessor(), tiny.TEXTS), 1, axis=1)
    with pytest.raises(ServedWrong, match=r"baseline-fp32 in Triton: \d of 7 .*; first row 0$"):
        compare(model, "text-classification", answers(logits), ClassIds(np.zeros(len(logits), np.int64)))


@pytest.mark.whole
@pytest.mark.parametrize(("flips", "passed"), [(5, True), (6, False)])
def test_served_rows_may_flip_as_often_as_those_of_an_engine(tmp_path, flips, passed):
    """Of 872 rows five may differ, in export, `verify` and here: one rule."""
    prepared, rows = tiny.text_preprocessor(), (tiny.TEXTS * 125)[:872]
    model = layout.served_models(tiny.export(tmp_path, prepared, rows))[0]
    logits = tiny.expected(prepared, rows)
    logits[:flips] = np.roll(logits[:flips], 1, axis=1)
    if passed:
        assert compare(model, "text-classification", answers(logits), ClassIds(np.zeros(872, np.int64))).disagreements == flips
    else:
        with pytest.raises(ServedWrong, match=r"6 of 872 predictions .* \(at most 5\)"):
            compare(model, "text-classification", answers(logits), ClassIds(np.zeros(872, np.int64)))


def test_drifted_logits_fail(model):
    logits = tiny.expected(tiny.text_preprocessor(), tiny.TEXTS) + np.float32(0.1)
    with pytest.raises(ServedWrong, match=r"median \|dlogit\| 0.1000"):
        compare(model, "text-classification", answers(logits), ClassIds(np.zeros(len(logits), np.int64)))


def test_labels_have_to_be_those_of_the_logits(model):
    logits = tiny.expected(tiny.text_preprocessor(), tiny.TEXTS)
    given = answers(logits)
    labels = given.outputs["LABEL"]
    labels[1] = next(name.encode() for name in tiny.LABELS if name.encode() != labels[1, 0])
    with pytest.raises(ServedWrong, match=r"row 1 has LABEL .*, but its logits give"):
        compare(model, "text-classification", given, ClassIds(np.zeros(len(logits), np.int64)))


def test_serving_what_is_no_repository(tmp_path, no_server):
    with pytest.raises(InputError, match="holds no model"):
        server_of(tmp_path, tmp_path / "log")
    (tmp_path / "gpu.json").touch()
    with pytest.raises(InputError, match="for GPUs"):
        server_of(tmp_path, tmp_path / "log")


def test_gpu_without_golden_answers(tmp_path):
    tiny.export(tmp_path / "export", tiny.text_preprocessor(), tiny.TEXTS)
    document = json.loads((tmp_path / "export" / "export.json").read_text())
    document["builds"][0]["engines"] = []
    (tmp_path / "export" / "export.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="no golden logits"):
        TritonRepo().run(Artifact(tmp_path / "export", {}), context(tiny.TEXTS, tmp_path, device="cuda", engines=("tensorrt",)), tmp_path)


def test_the_layout_of_a_repository_for_tensorrt_is_part_of_the_cache_key(tmp_path, no_server):
    stage = TritonRepo(serve=False)
    with_plans = context(tiny.TEXTS, tmp_path, engines=("onnxruntime", "tensorrt"))
    assert stage.depends(with_plans) == {"plans": SCHEMA}
    assert stage.depends(context(tiny.TEXTS, tmp_path)) is None
    assert TritonRepo().depends(context(tiny.TEXTS, tmp_path, device="cuda", engines=("tensorrt",))) == {"plans": SCHEMA}


def test_keys_for_gpus_are_part_of_the_cache_key_only_where_they_were_given():
    assert "gpu" not in TritonRepo().model_dump()
    assert TritonRepo(gpu=Gpu(refit=True)).model_dump()["gpu"]["refit"]
