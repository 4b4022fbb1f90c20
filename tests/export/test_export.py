import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import transformers

from export.builds import planned
from export.choices import Generation
from export.engines import openvino
from export.engines.spec import spec_of
from export.export import Export
from export.exporter import Exporter
from export.generation.agreement import Agreement
from export.parity.parity import ParityError
from foundation.artifacts.exported import Engine, Exported
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.measure.answers import load_logits, load_predictions, save_predictions
from foundation.measure.engine_process import EngineProcess
from foundation.measure.metrics import metrics
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.schemes.checkpoint import load_quantization
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor
from tests.engines_inside import inside
from tests.export import sentiment
from tests.problems import raises_problem

NEEDS_BF16 = pytest.mark.skipif(not openvino.computes_bf16(), reason="this processor has no bf16")

pytestmark = pytest.mark.whole


@pytest.fixture(autouse=True)
def _engines_inside() -> Iterator[None]:
    """Of what is exported for all tests the first engines are processes; what one test exports for itself needs none."""
    with inside():
        yield


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    checkpoints = {"baseline": sentiment.checkpoint(), "quantize": sentiment.quantized()}
    return sentiment.context(tmp_path_factory.mktemp("scratch"), checkpoints)


@pytest.fixture(scope="module")
def exported(context: Context, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("out")
    with inside(outside=range(4)):  # one of each engine and mode, and one in integers
        figures = Export(id="export").run(context.checkpoints["quantize"], answered(context), out)
    assert json.loads(json.dumps(figures)) == figures
    return out, json.loads((out / "export.json").read_text())


def entries(document: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(build, engine) for build in document["builds"] for engine in build["engines"]]


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)


def answered(context: Context) -> Context:
    """What torch answers is there, as it is in a run: another process of torch takes seconds to start. `test_towers` asks it."""
    count = len(context.data.evaluation)
    return replace(context, predictions={name: sentiment.answers(made.path, count) for name, made in context.checkpoints.items()})


def names(context: Context, variants: Any) -> list[str]:
    return [build.name for build in planned(context, variants)]


@pytest.mark.usefixtures("no_bf16")
def test_what_is_built(tmp_path: Path) -> None:
    floating, integer = sentiment.checkpoint(), sentiment.quantized()
    pruned = sentiment.context(tmp_path, {"baseline": floating, "prune": floating, "quantize": integer})
    assert names(pruned, "ends") == ["baseline-fp32", "prune-fp32", "quantize-int8"]
    assert names(pruned, "all") == ["baseline-fp32", "prune-fp32", "quantize-int8"]
    assert names(sentiment.context(tmp_path, {"baseline": floating, "prune": floating}), "ends") == ["baseline-fp32", "prune-fp32"]
    for variants in ("ends", "all"):
        assert names(sentiment.context(tmp_path, {"baseline": floating}), variants) == ["baseline-fp32"]


@pytest.mark.usefixtures("no_bf16")
def test_of_branches_the_ends_of_each_are_built(tmp_path: Path) -> None:
    floating, integer = sentiment.checkpoint(), sentiment.quantized()
    checkpoints = {"baseline": floating, "whole": integer, "distill": floating, "prune": floating, "small": integer, "other": floating}
    inputs = {"distill": "baseline", "other": "distill"}
    context = sentiment.context(tmp_path, checkpoints, inputs=inputs)
    assert names(context, "ends") == ["baseline-fp32", "whole-int8", "prune-fp32", "small-int8", "other-fp32"]
    assert {build.variant: build.floating for build in planned(context, "ends")} == {
        "baseline": "baseline", "whole": "baseline", "prune": "prune", "small": "prune", "other": "other"
    }  # fmt: skip
    assert len(names(context, "all")) == len(checkpoints)


def test_a_processor_with_bf16_gets_the_float_variant_behind_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: True)
    floating, integer = sentiment.checkpoint(), sentiment.quantized()
    checkpoints = {"baseline": floating, "prune": floating, "small": integer, "whole": integer}
    assert names(sentiment.context(tmp_path, checkpoints, inputs={"whole": "baseline"}), "ends")[-1] == "baseline-bf16"
    assert names(sentiment.context(tmp_path, {**checkpoints}, inputs={"whole": "prune"}), "ends")[-1] == "prune-bf16"


def test_a_processor_with_bf16_gets_the_last_float_variant_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: True)
    context = sentiment.context(tmp_path, {"baseline": sentiment.checkpoint(), "quantize": sentiment.quantized()})
    assert names(context, "ends")[-1] == "baseline-bf16"
    assert planned(context, "ends")[-1].float_precision == "bf16"
    assert "baseline-bf16" not in names(replace(context, target=Target(engines=("onnxruntime",))), "ends")


def test_openvino_needs_a_cpu_target(tmp_path: Path) -> None:
    context = sentiment.context(tmp_path, {"baseline": sentiment.checkpoint()}, Target(device="cuda"))
    with pytest.raises(InputError, match=r"target.engines: openvino given with target.device cuda"):
        Export().run(context.baseline, context, tmp_path)


def test_every_build_has_its_engines_the_recommended_mode_first(exported: tuple[Path, dict[str, Any]]) -> None:
    document = exported[1]
    folders = [build["folder"] for build in document["builds"] if build["precision"] != "bf16"]
    assert folders == ["baseline-fp32", "quantize-int8"]
    modes = [("openvino", "static"), ("openvino", "dynamic"), ("onnxruntime", "dynamic")]
    for build in document["builds"][:2]:
        assert [(engine["engine"], engine["mode"]) for engine in build["engines"] if engine["float_precision"] == "fp32"] == modes
        assert all(engine["runnable"] and engine["reason"] is None for engine in build["engines"]), build
    assert [build["float_part"] is not None for build in document["builds"][:2]] == [False, openvino.computes_bf16()]


def test_files_are_where_export_json_says(exported: tuple[Path, dict[str, Any]]) -> None:
    out, document = exported
    for build, engine in entries(document):
        assert Preprocessor.load(out / build["folder"]).buckets == (8, 16)
        assert (out / build["onnx"]).is_file()
        file = out / engine["file"]
        served = [file, file.with_suffix(".bin")] if engine["engine"] == "openvino" else [file]
        assert engine["size_bytes"] == sum(path.stat().st_size for path in served)
    assert not list(out.rglob("*.tmp"))


def test_predictions_are_those_of_the_checkpoint(exported: tuple[Path, dict[str, Any]], context: Context) -> None:
    out, document = exported
    split = context.data.evaluation
    for build, engine in entries(document):
        if build["precision"] == "bf16":
            continue
        logits, labels = load_predictions(out / engine["predictions"], "text-classification")
        np.testing.assert_array_equal(labels.array, split.labels.array)
        assert (engine["n"], engine["metrics"]) == (len(split), metrics("text-classification", logits, labels))
        model = load(context.checkpoints[build["variant"]].path)
        reference = predict(model, Preprocessor.load(out / build["folder"]), split.rows, 4)
        if engine["float_precision"] == "bf16":
            continue
        assert np.median(np.abs(logits - reference)) < 1e-4
        assert (logits.argmax(1) == reference.argmax(1)).sum() >= len(split) - 1


def test_int8_is_counted_and_compared_layer_by_layer(exported: tuple[Path, dict[str, Any]]) -> None:
    quantized = list(load_quantization(sentiment.quantized())[0])
    for build, engine in entries(exported[1]):
        parity = engine["parity"]
        exact = engine["float_precision"] == "fp32"
        assert (parity["passed"] or not exact, parity["n"], parity["limit"]) == (True, 40, 1)
        if build["precision"] == "int8":
            assert [layer["name"] for layer in engine["layers"] if layer["precision"] == "int8"] == quantized
            assert 0.9 < engine["int8_share"] < 1
        if build["precision"] == "int8" and exact:
            assert [layer["layer"] for layer in parity["layers"]] == quantized
            assert all(layer["different"] == layer["allowed"] and layer["wrong_sums"] == 0 for layer in parity["layers"])
        elif build["precision"] == "int8":
            assert parity["layers"] == []
        else:
            assert (parity["layers"], engine["int8_share"], engine["int8_share_all"]) == ([], 0.0, 0.0)
    assert all(build["parity"]["passed"] for build in exported[1]["builds"][:2])


def test_int8_has_q_dq_and_float_has_not(exported: tuple[Path, dict[str, Any]]) -> None:
    operators = {
        folder: {node.op_type for node in onnx.load(exported[0] / folder / "model.onnx").graph.node}
        for folder in ("quantize-int8", "baseline-fp32")
    }
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators["quantize-int8"]
    assert not {"QuantizeLinear", "DequantizeLinear"} & operators["baseline-fp32"]


@NEEDS_BF16
def test_bf16_runs_from_the_graph_of_fp32_with_tables_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: True)
    context = answered(small(tmp_path / "scratch", ("openvino",)))
    (tmp_path / "out").mkdir()
    Export().run(context.baseline, context, tmp_path / "out")
    floating, half = json.loads((tmp_path / "out" / "export.json").read_text())["builds"]
    assert (floating["folder"], half["folder"]) == ("baseline-fp32", "baseline-bf16")
    assert {engine["file"] for engine in half["engines"]} == {"baseline-bf16/openvino_bf16.xml"}
    assert half["engines"][0]["size_bytes"] < floating["engines"][0]["size_bytes"]
    assert half["engines"][0]["properties"]["INFERENCE_PRECISION_HINT"] == "bf16"
    assert not list((tmp_path / "out" / "baseline-bf16").glob("*.onnx"))


def pair(scratch: Path) -> Context:
    """A tiny float variant and its int8, for OpenVINO alone."""
    target = Target(engines=("openvino",), batch_sizes=(1,), sequence_lengths=(8,), threads=1)
    return answered(sentiment.context(scratch, {"baseline": sentiment.checkpoint(), "quantize": sentiment.quantized()}, target, count=6))


def build_one(context: Context, number: int, out: Path, rest: Any, answers: dict[Any, Any]) -> dict[str, Any]:
    """Does what the stage does with one of its builds, and adds what the engines answered."""
    out.mkdir(parents=True)
    return Exporter(planned(context, "ends")[number], context, out, rest, answers, Agreement(context, Generation())).run().written()


@pytest.fixture(scope="module")
def float_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What the engine of the float variant answers to the trial rows: the float part of int8 is judged by it."""
    answers: dict[Any, Any] = {}
    with inside():
        build_one(pair(tmp_path_factory.mktemp("scratch")), 0, tmp_path_factory.mktemp("float") / "out", "auto", answers)
    return answers


@NEEDS_BF16
@pytest.mark.parametrize(("rest", "first"), [pytest.param("bf16", "bf16", marks=pytest.mark.slow), ("auto", "fp32"), ("auto", "bf16")])
def test_the_float_part_of_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float_answers: dict[Any, Any], rest: str, first: str
) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: True)
    monkeypatch.setattr("foundation.measure.closeness.ADDED_FLOOR", 1.0 if first == "bf16" else -1.0)
    monkeypatch.setattr("foundation.measure.closeness.ADDED_SHARE", 0.25 if first == "bf16" else -1.0)
    build = build_one(pair(tmp_path / "scratch"), 1, tmp_path / "out", rest, dict(float_answers))
    assert (build["precision"], build["float_precision"], build["parity"]["passed"]) == ("int8", "fp32", True)
    engines, judged = build["engines"], build["float_part"]
    assert engines[0]["float_precision"] == first
    assert [engine["float_precision"] for engine in engines].count("bf16") == (rest != "fp32")
    assert len({engine["predictions"] for engine in engines}) == len(engines)
    for engine in engines:
        assert engine["properties"]["INFERENCE_PRECISION_HINT"] == {"fp32": "f32", "bf16": "bf16"}[engine["float_precision"]]
    assert (judged is not None) == (rest == "auto")
    if judged:
        assert (judged["precision"], judged["rows"] > 0, judged["fp32"] > 0, judged["half"] > 0) == (first, True, True, True)


def test_a_processor_without_bf16_is_not_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    context = pair(tmp_path)
    with raises_problem("stages.export.float_precision", "bf16", "no bf16", "give auto or fp32"):
        Export(float_precision="bf16").run(context.baseline, context, tmp_path)


def test_what_was_exported_opens_again(exported: tuple[Path, dict[str, Any]], context: Context) -> None:
    out, document = exported
    build = Exported.model_validate(document).builds[1]
    for engine in build.engines:
        with EngineProcess(spec_of(out, build, engine, context.target)) as process:
            answer = process.predict(context.data.evaluation.rows, 4)
        np.testing.assert_allclose(answer, load_predictions(out / str(engine.predictions), "text-classification")[0], atol=1e-6)


def test_torch_predictions_that_are_there_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = small(tmp_path / "scratch", ("torch",))
    save_predictions(tmp_path / "torch.safetensors", np.float32([[1, 2]] * 6), context.data.evaluation.labels)
    monkeypatch.setattr(EngineProcess, "__init__", lambda *_: pytest.fail("a process was started"))
    (tmp_path / "out").mkdir()
    Export().run(context.baseline, replace(context, predictions={"baseline": tmp_path / "torch.safetensors"}), tmp_path / "out")
    (build,) = json.loads((tmp_path / "out" / "export.json").read_text())["builds"]
    np.testing.assert_array_equal(load_logits(tmp_path / "out" / build["engines"][0]["predictions"]), [[1, 2]] * 6)


def small(scratch: Path, engines: tuple[str, ...]) -> Context:
    target = Target(engines=engines, batch_sizes=(1,), sequence_lengths=(8,), threads=1)
    return sentiment.context(scratch, {"baseline": sentiment.checkpoint()}, target, count=6)


def test_torch_as_an_engine(tmp_path: Path) -> None:
    context = small(tmp_path / "scratch", ("torch",))
    (tmp_path / "out").mkdir()
    Export().run(context.baseline, context, tmp_path / "out")
    (build,) = json.loads((tmp_path / "out" / "export.json").read_text())["builds"]
    (entry,) = build["engines"]
    assert (entry["mode"], entry["file"], entry["int8_share"], entry["n"], build["parity"]) == ("eager", None, None, 6, None)
    assert "no graph" in entry["int8_share_reason"]


def test_an_engine_that_cannot_run_here_is_listed_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def build(model: Path, folder: Path, **settings: Any) -> list[Engine]:
        half = settings.get("half")
        asked.append(settings | {"model": model.name if half is None else half.plain.name, "folder": folder.name})
        return [Engine(engine="tensorrt", mode="dynamic", float_precision="fp32", runnable=False, reason="no GPU")]

    monkeypatch.setattr("export.engines.tensorrt.build_plans", build)
    context = answered(small(tmp_path / "scratch", ("tensorrt", "onnxruntime")))
    (tmp_path / "out").mkdir()
    Export().run(context.baseline, context, tmp_path / "out")
    written, half = json.loads((tmp_path / "out" / "export.json").read_text())["builds"]
    assert [(entry["engine"], entry["runnable"]) for entry in written["engines"]] == [("tensorrt", False), ("onnxruntime", True)]
    assert [(entry["engine"], entry["runnable"]) for entry in half["engines"]] == [("tensorrt", False)]
    assert {(settings["buckets"], settings["max_batch_size"]) for settings in asked} == {((8, 16), 1)}
    told = [(settings["precision"], settings["folder"], settings["model"]) for settings in asked]
    assert told == [("fp32", "baseline-fp32", "model.onnx"), ("fp16", "baseline-fp16", "model_fp16.onnx")]


def shifted(entry_mode: str, original: Any) -> Any:
    """Makes the predictions of one mode wrong by a constant."""

    def wrong(process: EngineProcess, rows: Any, batch_size: int, on_rows: Any = None) -> Any:
        logits = original(process, rows, batch_size, on_rows)
        return logits + np.float32(0.5) if process.job.labels["mode"] == entry_mode else logits

    return wrong


@pytest.mark.usefixtures("no_bf16")
def test_a_mode_that_differs_from_torch_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineProcess, "predict", shifted("static", EngineProcess.predict))
    context = answered(small(tmp_path / "scratch", ("openvino",)))
    (tmp_path / "out").mkdir()
    Export().run(context.baseline, context, tmp_path / "out")
    (build,) = json.loads((tmp_path / "out" / "export.json").read_text())["builds"]
    assert [(entry["mode"], entry["runnable"]) for entry in build["engines"]] == [("dynamic", True), ("static", False)]
    wanted = (
        "parity: baseline-fp32 openvino static: 0 of 6 predictions differ from torch (at most 1), median |dlogit| 0.5000 (at most 0.02)"
    )
    assert build["engines"][1]["reason"] == wanted
    assert f"{wanted}; this mode is left out" in context.progress.warnings
    assert build["parity"]["mode"] == "dynamic"


@pytest.mark.usefixtures("no_bf16")
def test_an_engine_without_a_mode_that_agrees_stops_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineProcess, "predict", shifted("dynamic", EngineProcess.predict))
    context = answered(small(tmp_path / "scratch", ("onnxruntime",)))
    (tmp_path / "out").mkdir()
    with pytest.raises(ParityError, match="baseline-fp32 onnxruntime dynamic: 0 of 6 predictions"):
        Export().run(context.baseline, context, tmp_path / "out")


@pytest.mark.usefixtures("no_bf16")
def test_wrong_integers_stop_the_stage_and_name_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = EngineProcess.probe

    def wrong(process: EngineProcess, tensors: Any, rows: Any, length: int | None) -> Any:
        found = original(process, tensors, rows, length)
        saturated = tensors[5 * 3 + 2 - 2 * 2]  # the output of a layer in the middle
        return {name: np.minimum(value, np.quantile(value, 0.9)) if name == saturated else value for name, value in found.items()}

    monkeypatch.setattr(EngineProcess, "probe", wrong)
    context = replace(
        pair(tmp_path / "scratch"), target=Target(engines=("onnxruntime",), batch_sizes=(1,), sequence_lengths=(8,), threads=1)
    )
    with pytest.raises(ParityError, match=r"quantize-int8 onnxruntime dynamic: bert.encoder.layer.0.\S+ is the"):
        build_one(context, 1, tmp_path / "out", "auto", {})


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2", "granitemoehybrid", "rwkv", "qwen3_next"])
def test_engines_with_a_cache_refuse_recurrent_models_before_anything_runs(kind: str, context: Context) -> None:
    config = transformers.AutoConfig.for_model(kind)
    given = replace(context, task="text-generation", target=Target(engines=("openvino", "openvino_genai"), sequence_lengths=(8,)))
    with raises_problem("engines", "openvino_genai", "keys and values", f"this {kind}"):
        Export().check(config, config, given)
    Export().check(config, config, replace(given, target=Target(engines=("openvino",), sequence_lengths=(8,))))
    for other in ("llama", "mistral", "mixtral", "gpt2"):
        Export().check(transformers.AutoConfig.for_model(other), config, given)


@pytest.mark.parametrize(
    ("task", "engines", "parts"),
    [
        ("text-generation", ("onnxruntime_decoder", "openvino_genai"), ("openvino_genai", "onnxruntime_decoder")),
        ("text-generation", ("openvino",), ("without an engine that answers", "onnxruntime_decoder")),
        ("text-classification", ("onnxruntime",), ("text-classification", "decoders")),
    ],
)
def test_answers_that_do_not_depend_on_company_need_an_engine_that_has_them(
    task: Any, engines: tuple[Any, ...], parts: tuple[str, ...], context: Context
) -> None:
    config = transformers.AutoConfig.for_model("llama")
    stage = Export(generation=Generation(batch_invariant=True))
    given = replace(context, task=task, target=Target(engines=engines, sequence_lengths=(8,)))
    with raises_problem("generation.batch_invariant", *parts):
        stage.check(config, config, given)
    alone = replace(context, task="text-generation", target=Target(engines=("onnxruntime_decoder", "onnxruntime"), sequence_lengths=(8,)))
    stage.check(config, config, alone)
