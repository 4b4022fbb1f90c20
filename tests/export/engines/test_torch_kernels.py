"""The engine on the fused kernels: refusals in one line, its plan, probes and precisions; the stage in the interpreter."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from export.builds import Build
from export.engines import registry, torch_kernels
from export.engines.spec import BuildRequest, EngineSpec
from export.engines.torch_kernels import FILE, MODE, TorchKernels
from export.export import Export
from export.graph.onnx import export_float
from export.graph.qdq import insert_qdq
from export.parity.parity import ParityError, check_layers, compare_layers, quantized_gemms
from foundation.artifacts.graph import Graph
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.measure.engine_process import EngineProcess
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from foundation.standalone.preprocess import Preprocessor
from quantize.quantize import Quantize
from tests.architectures.steps import Bench
from tests.architectures.table import ARCHITECTURES
from tests.export import sentiment
from tests.export.fused import encoders
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

pytest.importorskip("triton")  # the extra `kernels`, which `dev` includes


def request(build: Path, checkpoint: Path, lines: list[str]) -> BuildRequest:
    return BuildRequest(
        "torch_kernels", Checkpoint(checkpoint), build / "model.onnx", build.parent, build, build, "int8", "fp32", False, (8, 16),
        sentiment.TARGET, lines.append,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plan(int8_build: Path) -> EngineSpec:
    lines: list[str] = []
    (entry,) = torch_kernels.build(request(int8_build, sentiment.quantized(), lines))
    assert (entry.mode, entry.file, entry.runnable, lines) == (MODE, f"{int8_build.name}/{FILE}", True, [])
    assert 0.5 < entry.integer_weights < 1  # type: ignore[operator]
    assert 0 < entry.size_bytes == (int8_build / FILE).stat().st_size
    both = torch_kernels.build(replace(request(int8_build, sentiment.quantized(), lines), fp16_float_part=True))
    assert [entry.float_precision for entry in both] == ["fp32", "fp16"]
    return EngineSpec("torch_kernels", MODE, "int8", "fp32", "cpu", 1, str(int8_build / FILE), str(int8_build), (1, 4))


def probed(spec: EngineSpec, names: list[str], features: Any) -> tuple[np.ndarray, dict[str, np.ndarray], Any]:
    """Called in the process that interprets."""
    engine = TorchKernels(spec)
    return engine.predict(features), engine.probe(names, features), engine.placement()


@pytest.fixture(scope="module")
def answers(interpreted: Callable[..., Any], plan: EngineSpec, int8_build: Path, prepared: Preprocessor) -> Any:
    names = [name for gemm in quantized_gemms(Graph(int8_build / "model.onnx")) for name in gemm.tensors]
    return interpreted(probed, plan, list(dict.fromkeys(names)), prepared.encode(sentiment.rows(1)))


def test_it_passes_the_gate_layer_by_layer(answers: Any, int8_build: Path, prepared: Preprocessor) -> None:
    logits, tensors, placement = answers
    gemms = quantized_gemms(Graph(int8_build / "model.onnx"))
    layers = compare_layers(gemms, tensors)
    check_layers("torch_kernels", layers)
    assert len(layers) == 12
    assert all(layer.codes > 100 and layer.sums > 100 for layer in layers)
    given = {name: torch.from_numpy(array) for name, array in prepared.encode(sentiment.rows(1)).items()}
    with torch.inference_mode():
        wanted: Any = load(sentiment.quantized())(**given)
    np.testing.assert_allclose(logits, wanted.logits.numpy(), atol=0.05)
    assert placement == {"device": "cpu", "provider": "triton interpreter", "float_precision": "fp32"}


def test_a_wrong_scale_does_not_pass_the_gate(answers: Any, int8_build: Path) -> None:
    gemms = quantized_gemms(Graph(int8_build / "model.onnx"))
    wrong = [replace(gemm, input_scale=gemm.input_scale * np.float32(1.02)) for gemm in gemms]
    with pytest.raises(ParityError, match=r"layer.0.attention.self.query is the first .* input codes differ"):
        check_layers("torch_kernels", compare_layers(wrong, answers[1]))


def test_precisions_are_those_of_the_plan(interpreted: Callable[..., Any], plan: EngineSpec) -> None:
    layer = "bert.encoder.layer.0"
    gemms = [f"{layer}.output.dense/MatMul", f"{layer}.attention.self/qk", "bert.pooler.dense/Gemm", "other/MatMul"]
    assert interpreted(precisions, plan, gemms) == {gemms[0]: "int8", gemms[1]: "fp32", gemms[2]: "fp32"}


def precisions(spec: EngineSpec, gemms: list[str]) -> dict[str, str]:
    return TorchKernels(spec).precisions(gemms, 1, 8)


def test_float_builds_and_other_schemes_are_refused() -> None:
    for precision in ("fp32", "bf16", "int8-dynamic", "w4a16", "fp8"):
        told = torch_kernels.refusal(precision, Path("model.onnx"))
        assert told == f"it runs int8 with static scales only (scheme w8a8), and this build is {precision}"
    assert torch_kernels.refusal("int8", Path("model.onnx")) is None


def test_a_model_of_other_layers_is_an_entry_that_says_so(int8_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(checkpoint: Path, nodes: Any, longest: int) -> Any:
        raise InputError("model", "its layers are others")

    monkeypatch.setattr("export.fused.parts.plan_of", refuse)
    lines: list[str] = []
    (entry,) = torch_kernels.build(request(int8_build, sentiment.quantized(), lines))
    assert (entry.runnable, entry.reason, entry.file) == (False, "model: its layers are others", None)
    assert lines == ["torch_kernels: model: its layers are others"]


def test_without_a_gpu_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (problem,) = registry.absent(Target(device="cpu", engines=("torch_kernels",)))
    assert (problem.key, problem.given) == ("target.engines", "torch_kernels given")
    assert "target.device: cuda" in problem.remedy
    (line,) = map(str, registry.absent(Target(device="cuda", engines=("torch_kernels",))))
    assert line.startswith("target.device: cuda given; torch finds no NVIDIA GPU that it can use")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert registry.absent(Target(device="cuda", engines=("torch_kernels",))) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (line,) = map(str, registry.absent(Target(device="cuda", engines=("torch_kernels",))))
    assert line.startswith("target.engines: torch_kernels given; the package triton is not installed: pip install")


def test_opening_it_without_a_gpu_is_refused(plan: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with raises_problem("target.engines", "torch_kernels", "NVIDIA GPUs", "device is cpu"):
        TorchKernels(plan)


@pytest.mark.slow
def test_the_stage_builds_gates_and_evaluates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    checkpoints = {"baseline": sentiment.checkpoint(), "quantize": sentiment.quantized(8)}
    target = Target(engines=("torch_kernels",), batch_sizes=(1, 4), sequence_lengths=(8,), threads=1)
    context = sentiment.context(tmp_path, checkpoints, target, count=8)
    out = tmp_path / "out"
    out.mkdir()
    Export(float_precision="fp16").run(context.checkpoints["quantize"], context, out)
    first, last = json.loads((out / "export.json").read_text(encoding="utf-8"))["builds"]
    assert [entry["runnable"] for entry in first["engines"]] == [False]
    half, entry = last["engines"]  # what was asked for comes first
    assert [(one["runnable"], one["mode"], one["float_precision"]) for one in (half, entry)] == [(True, MODE, "fp16"), (True, MODE, "fp32")]
    assert half["predictions"] != entry["predictions"]
    assert half["parity"]["layers"] == []
    assert 0.9 < entry["int8_share"] < 1
    assert len(entry["parity"]["layers"]) == 12
    assert all(layer["different"] == layer["allowed"] and not layer["wrong_sums"] for layer in entry["parity"]["layers"])


@pytest.mark.slow
def test_a_head_in_int8_passes_the_gate_too(interpreted: Callable[..., Any], tmp_path: Path) -> None:
    """Its layers are nodes that add the bias themselves."""
    checkpoint = encoders.checkpoint(tmp_path, encoders.Shape(head=True))
    prepared = Preprocessor(
        "text", ("input_ids", "attention_mask"), ("a", "b", "c"), "text-classification", encoders.LENGTH, (encoders.LENGTH,),
        pad_token_id=1, tokenizer=Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    )  # fmt: skip
    build = tmp_path / "build"
    build.mkdir()
    prepared.save(build)
    insert_qdq(Graph(export_float(Checkpoint(checkpoint), prepared, tmp_path / "float.onnx")), Checkpoint(checkpoint), build / "model.onnx")
    (entry,) = torch_kernels.build(request(build, checkpoint, []))
    spec = EngineSpec("torch_kernels", MODE, "int8", "fp32", "cpu", 1, str(tmp_path / str(entry.file)), str(build), (1, 4))
    gemms = quantized_gemms(Graph(build / "model.onnx"))
    assert [bool(gemm.bias.any()) for gemm in gemms] == [False] * 12 + [True] * 2
    names = list(dict.fromkeys(name for gemm in gemms for name in gemm.tensors))
    _, tensors, _ = interpreted(probed, spec, names, encoders.features(2))
    check_layers("torch_kernels", compare_layers(gemms, tensors))


@pytest.mark.gpu
def test_on_a_gpu_it_passes_the_gate_and_recordings_answer_alike(plan: EngineSpec, int8_build: Path, prepared: Preprocessor) -> None:
    gemms, features = quantized_gemms(Graph(int8_build / "model.onnx")), prepared.encode(sentiment.rows(4))
    names = list(dict.fromkeys(name for gemm in gemms for name in gemm.tensors))
    engine = TorchKernels(replace(plan, device="cuda"))
    check_layers("torch_kernels", compare_layers(gemms, engine.probe(names, features)))
    together = engine.predict(features)
    np.testing.assert_array_equal(engine.predict(features), together)
    for number in range(4):
        alone = engine.predict({name: array[number : number + 1] for name, array in features.items()})
        np.testing.assert_allclose(alone[0], together[number], atol=1e-4)
    with EngineProcess(replace(plan, device="cuda")) as process:
        np.testing.assert_array_equal(process.predict(sentiment.rows(4), 4), together)


@pytest.mark.slow  # a minute in the interpreter; tests/export/fused/test_images.py compares the codes of every layer
def test_a_vit_passes_the_gate_in_its_patches_and_in_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.of(ARCHITECTURES["vit"], tmp_path)
    quantized = bench.run(Quantize(mode="ptq", calibration={"rows": 16}, weight_bits=7, convolutions=True))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    target = Target(engines=("torch_kernels",), batch_sizes=(1, 2), threads=1)
    context = replace(bench.context, target=target, checkpoints={"quantize": quantized})
    monkeypatch.setattr("export.builds.planned", lambda *_: [Build("quantize", Checkpoint(quantized.path), "int8", "quantize")])
    out = bench.out("export")
    Export(float_precision="fp32").run(quantized, context, out)
    (build,) = json.loads((out / "export.json").read_text(encoding="utf-8"))["builds"]
    (entry,) = build["engines"]
    assert (entry["engine"], entry["runnable"], entry["parity"]["passed"]) == ("torch_kernels", True, True), entry["reason"]
    scales, _ = load_quantization(quantized.path)
    assert {layer["layer"] for layer in entry["parity"]["layers"]} == set(scales)
    assert any("patch" in name for name in scales)
