"""The engine of decoders on the fused kernels: its gate and its answers in the stage, texts that take turns, refusals in one line."""

from __future__ import annotations

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
from transformers import PreTrainedTokenizerFast

from export.builds import Build
from export.choices import Generation
from export.engines import torch_kernels_decoder
from export.engines.spec import BuildRequest, EngineSpec
from export.engines.torch_kernels import MODE
from export.engines.torch_kernels_decoder import FILE, FOLDER, TorchKernelsDecoder
from export.export import Export
from foundation.core.decoding import Decoding
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.table import SCHEMES
from quantize.quantize import Quantize
from tests.architectures.steps import Bench
from tests.architectures.table import ARCHITECTURES
from tests.export.fused.decoder import decoders
from tests.export.fused.decoder.decoders import LENGTH, WORDS, Shape
from tests.seldom import seldom

pytestmark = pytest.mark.whole

pytest.importorskip("triton")  # the extra `kernels`, which `dev` includes

STAGES = (("gpt2", "w8a8"), ("llama", "w4a16"), ("llama", "w8a8-dynamic"))
PROMPTS = [np.array(ids, np.int32) for ids in ([5, 9, 31, 7], [3], [40, 4, 4, 18, 22], [6, 6])]


@pytest.mark.slow
@pytest.mark.parametrize("case", seldom(STAGES, STAGES[1:]), ids=str)
def test_the_stage_gates_its_layers_and_answers(case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, scheme = case
    architecture = replace(
        ARCHITECTURES[name], config={**ARCHITECTURES[name].config, "num_hidden_layers": 1}
    )  # the interpreter takes its time
    bench = Bench.of(architecture, tmp_path)
    settings = {"weight_bits": 7} if scheme.startswith("w8a8") else {"group_size": 16}
    quantized = bench.run(Quantize(mode="ptq", scheme=scheme, calibration={"rows": 16}, **settings))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    target = Target(engines=("torch_kernels_decoder",), batch_sizes=(1, 2), threads=1)
    context = replace(bench.context, target=target, checkpoints={"baseline": bench.float_model, "quantize": quantized})
    precision = SCHEMES[scheme].precision
    monkeypatch.setattr("export.builds.planned", lambda *_: [Build("quantize", Checkpoint(quantized.path), precision, "quantize")])
    out = bench.out("export")
    Export(float_precision="fp32", generation=Generation(prompts=2, tokens=4)).run(quantized, context, out)
    (build,) = json.loads((out / "export.json").read_text(encoding="utf-8"))["builds"]
    (entry,) = build["engines"]
    assert (entry["engine"], entry["runnable"], entry["parity"]["passed"]) == ("torch_kernels_decoder", True, True), entry["reason"]
    assert (entry["parity"]["tokens"]["passed"], entry["generation"]["torch"]["identical"]) == (True, 2)
    layers = {layer["layer"] for layer in entry["parity"]["layers"]}
    assert layers == (set(load_quantization(quantized.path)[0]) if scheme == "w8a8" else set())
    shares = [entry["int8_share"], entry["int4_share"]]
    assert [share is not None and share > 0.5 for share in shares] == [scheme != "w4a16", scheme == "w4a16"]
    assert entry["metrics"]["perplexity"] > 1
    assert (entry["cache_precision"], entry["file"]) == ("fp32", f"{build['folder']}/{FOLDER}/{FILE}")


def request(build: Path, checkpoint: Path, lines: list[str], **more: Any) -> BuildRequest:
    build.mkdir()
    target = Target(engines=("torch_kernels_decoder",), batch_sizes=(1,), threads=1)
    return BuildRequest(
        "torch_kernels_decoder", Checkpoint(checkpoint), build / "model.onnx", build.parent, build, build, "int8", "fp32", False, (8,),
        target, lines.append, **more,
    )  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A decoder of one layer with a tokenizer; its graph is not looked at."""
    monkeypatch.setattr(torch_kernels_decoder, "nodes_of", lambda model: {})
    folder = decoders.checkpoint(tmp_path, Shape("llama", config={"num_hidden_layers": 1}))
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2").save_pretrained(folder)
    return folder


def engine_of(folder: Path, **more: Any) -> EngineSpec:
    return EngineSpec("torch_kernels_decoder", MODE, "int8", "fp32", "cpu", 1, str(folder / FILE), str(folder), **more)


def answered(spec: EngineSpec, decoding: Decoding, rows: int) -> tuple[list[Any], list[tuple[int, list[int]]], dict[str, str], Any]:
    """Called in the process that interprets."""
    told: list[tuple[int, list[int]]] = []
    torch_kernels_decoder.ROWS = rows
    engine = TorchKernelsDecoder(spec)
    answers = engine.generate(PROMPTS, decoding, lambda number, tokens: told.append((number, list(tokens))))
    names = ["lm_head/MatMul", "model.layers.0.mlp.up_proj/MatMul", "model.layers.0.self_attn/qk", "other/MatMul"]
    return [list(answer.tokens[0]) for answer in answers], told, engine.precisions(names, 1, 8), engine.placement()


@pytest.mark.slow
def test_prompts_take_turns_and_get_torchs_tokens(interpreted: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    (entry,) = torch_kernels_decoder.build(request(tmp_path / "build", checkpoint, lines))
    assert (entry.mode, entry.runnable, entry.cache_precision, lines) == (MODE, True, "fp32", [])
    assert entry.reads == {"weight_bytes": entry.reads["weight_bytes"], "cache_bytes_per_token": 4 * 2 * 2 * 16}
    spec = engine_of(tmp_path / "build" / FOLDER)
    answers, told, precisions, placement = interpreted(answered, spec, Decoding(max_tokens=5, ignore_end=True), 2)
    assert answers == decoders.greedy_in_torch(checkpoint, [prompt.tolist() for prompt in PROMPTS], 5)
    assert [[token for number, tokens in told if number == one for token in tokens] for one in range(len(PROMPTS))] == answers
    assert [number for number, _ in told[:4]] == [0, 1, 0, 1]  # two at once
    assert precisions == {"lm_head/MatMul": "fp32", "model.layers.0.mlp.up_proj/MatMul": "int8", "model.layers.0.self_attn/qk": "fp32"}
    assert placement == {"device": "cpu", "provider": "triton interpreter", "float_precision": "fp32"}


def refused(spec: EngineSpec, prompt: list[int], decoding: Decoding) -> str:
    """Called in the process that interprets."""
    try:
        TorchKernelsDecoder(spec).generate([np.array(prompt, np.int32)], decoding)
    except InputError as error:
        return "; ".join(error.lines)
    return "answered"


def test_what_it_cannot_answer_is_refused(interpreted: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    list(torch_kernels_decoder.build(request(tmp_path / "build", checkpoint, [])))
    spec = engine_of(tmp_path / "build" / FOLDER)
    told = interpreted(refused, spec, [1] * LENGTH, Decoding(max_tokens=1))
    assert told.startswith(f"prompt: {LENGTH} tokens given; the model reads {LENGTH} with its answer")
    assert "beams: 2 given" in interpreted(refused, spec, [1], Decoding(max_tokens=1, beams=2))


def test_other_precisions_caches_and_models_are_refused_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "bf16", "w4a8-block", "fp8"):
        told = torch_kernels_decoder.refusal(precision, Path("model.onnx"))
        assert told == f"it runs w8a8, w8a8-dynamic, w8a16 or w4a16, and this build is {precision}"
    assert [torch_kernels_decoder.refusal(one, Path("model.onnx")) for one in ("int8", "int8-dynamic", "w8a16", "w4a16")] == [None] * 4
    lines: list[str] = []
    (entry,) = torch_kernels_decoder.build(request(tmp_path / "cache", checkpoint, lines, kv_cache="int8"))
    assert (entry.runnable, "kv_cache: int8 given" in str(entry.reason)) == (False, True)
    encoder = request(tmp_path / "windows", checkpoint, lines)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    (entry,) = torch_kernels_decoder.build(encoder)
    assert (entry.runnable, entry.file) == (False, None)
    assert "its activation is relu" in str(entry.reason)
    assert len(lines) == 2


def test_fp16_is_a_mode_where_it_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    entries = list(torch_kernels_decoder.build(request(tmp_path / "build", checkpoint, [], fp16_float_part=True)))
    assert [(one.float_precision, one.cache_precision) for one in entries] == [("fp32", "fp32"), ("fp16", "fp16")]
    assert entries[0].reads["cache_bytes_per_token"] == 2 * entries[1].reads["cache_bytes_per_token"]


@pytest.mark.gpu
def test_on_a_gpu_recorded_steps_answer_as_torch_does(checkpoint: Path, tmp_path: Path) -> None:
    list(torch_kernels_decoder.build(request(tmp_path / "build", checkpoint, [])))
    engine = TorchKernelsDecoder(replace(engine_of(tmp_path / "build" / FOLDER), device="cuda"))
    answers = engine.generate(PROMPTS, Decoding(max_tokens=8, ignore_end=True))
    assert [list(one.tokens[0]) for one in answers] == decoders.greedy_in_torch(checkpoint, [prompt.tolist() for prompt in PROMPTS], 8)
    assert torch.cuda.is_available()
