"""Every launch of a whole encoder, compiled for GPUs that are not there: within their limits, integers by integer instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.ahead_of_time import FP16_MATRIX, INT8_MATRIX, at_capability, compiled, count
from export.fused.forward import Encoder
from export.fused.linears import FloatLinear, Int8Linear
from export.fused.plan import Block, Head, Plan
from export.fused.rows import Rows
from export.kernels.activation_codes import Activation
from export.kernels.epilogue import Int8Weight
from export.kernels.launch import Launch
from export.kernels.norm import Norm

META = torch.device("meta")
TOKENS, SEQUENCES = 1024, 8
NAMES = ["embed_quantize", *["int8_qkv", "packed_attention", "int8_gemm", "norm_quantize", "int8_gemm", "int8_gemm", "norm_quantize"] * 2]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def int8(name: str, outputs: int, inputs: int, scale: float = 0.02) -> Int8Linear:
    return Int8Linear(name, Int8Weight(meta(outputs, inputs, dtype=torch.int8), meta(outputs), meta(outputs)), scale)


def base(width: int = 768, inner: int = 3072) -> Plan:
    """BERT-base, two of its blocks."""
    norm = Norm(meta(width), meta(width), 1e-12)
    layers = [int8(name, width, width) for name in ("query", "key", "value", "out")]
    block = Block(*layers, int8("up", inner, width), int8("down", width, inner), 64, 0.125, norm, norm)  # type: ignore[arg-type]
    head = ((FloatLinear("pooler", meta(width, width), meta(width)), "tanh"), (FloatLinear("classifier", meta(2, width), meta(2)), "none"))
    tables = (meta(30522, width), meta(2, width), meta(512, width))
    return Plan(*tables, norm, 512, "gelu", (block, replace(block)), Head(head), {})  # type: ignore[arg-type]


def t5(gated: bool) -> Plan:
    """The encoder of T5-base, or of its v1.1, with the head of sentence-t5; two of its blocks."""
    width, inner, norm = 768, 2048 if gated else 3072, Norm(meta(768), None, 1e-6, centred=False)
    layers = {name: unbiased(name, width, width) for name in ("query", "key", "value", "out")}
    layers |= {"up": unbiased("up", inner, width), "down": unbiased("down", width, inner)}
    layers |= {"gate": unbiased("gate", inner, width)} if gated else {}
    block = Block(**layers, head_dim=64, scaling=1.0, out_norm=norm, ffn_norm=norm)  # type: ignore[arg-type]
    head = Head(((FloatLinear("dense", meta(2, width), None), "none"),), "mean", normalize=True)
    activation: Activation = "gelu_tanh" if gated else "relu"
    plan = Plan(meta(32128, width), None, None, norm, 512, activation, (block, replace(block)), head, {}, pre_norm=True)
    return replace(plan, relative=meta(12, 1023))


def unbiased(name: str, outputs: int, inputs: int) -> Int8Linear:
    return Int8Linear(name, Int8Weight(meta(outputs, inputs, dtype=torch.int8), meta(outputs)), 0.02)


def launches(plan: Plan, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Returns what a pass launches, which nothing runs."""
    made: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: made.append(launch))  # a method, which `append` itself is not
    ids = [meta(TOKENS, dtype=torch.int64) for _ in range(3)]
    rows = Rows(*ids, meta(SEQUENCES + 1, dtype=torch.int32), meta(SEQUENCES, dtype=torch.int64))
    logits = Encoder(plan, META, dtype).forward(rows)
    assert (logits.shape, logits.dtype) == ((SEQUENCES, 2), torch.float32)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_block_is_seven_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launches(base(), dtype, monkeypatch)
    assert [launch.kernel.fn.__name__.removesuffix("_kernel") for launch in made] == NAMES
    found = [launch.arguments.get("out", launch.arguments.get("codes")) for launch in made]
    stored = [None if tensor is None else tensor.dtype for tensor in found]
    block = [None, torch.int8, dtype, torch.int8, torch.int8, dtype, torch.int8]  # what the head reads is not quantized
    assert stored == [torch.int8, *block, *block[:-1], None]
    for launch in made:
        if "TILE_Q" in launch.arguments:  # the longest sequence that the model takes, whatever the batch holds
            assert launch.grid == (-(-512 // launch.arguments["TILE_Q"]), 12, SEQUENCES)


@pytest.mark.parametrize("gated", [False, True])
def test_a_block_of_t5_is_seven_kernels(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launches(t5(gated), torch.float16, monkeypatch)
    ffn = "int8_gated" if gated else "int8_gemm"
    block = ["int8_qkv", "packed_attention", "int8_gemm", "norm_quantize", ffn, "int8_gemm", "norm_quantize"]
    names = [launch.kernel.fn.__name__.removesuffix("_kernel") for launch in made]
    assert names == ["embed_quantize", *block, *block, "norm_quantize", "pool"]  # the last norm once for its sum, and once for the head
    first, attention, *_ = made[0], made[2]
    assert (first.arguments["kind"], first.arguments["position"], first.arguments["KEEP"]) == (None, None, "sum")
    assert not any(launch.arguments.get("CENTRED", False) for launch in made)
    assert attention.arguments["bias"] is not None
    assert [launch.arguments["ACTIVATION"] for launch in made if launch.arguments.get("out_scale", 1.0) != 1.0 and "ACTIVATION" in
            launch.arguments] == ["gelu_tanh" if gated else "relu"] * 2  # fmt: skip
    codes = [launch.arguments["out"].dtype for launch in made if "ACTIVATION" in launch.arguments]
    assert codes == [torch.float16, torch.int8, torch.float16] * 2


@pytest.mark.parametrize(("probed", "filled"), [(False, 1), (True, 4)])
def test_what_attention_does_not_write_is_filled_once_a_pass(probed: bool, filled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "run", lambda launch: None)
    made, zeros = list[Tensor](), torch.zeros

    def counted(*given: Any, **named: Any) -> Tensor:
        made.append(zeros(*given, **named))
        return made[-1]

    encoder = Encoder(base(), META, torch.float16)
    ids = [meta(TOKENS, dtype=torch.int64) for _ in range(3)]
    rows = Rows(*ids, meta(SEQUENCES + 1, dtype=torch.int32), meta(SEQUENCES, dtype=torch.int64), is_filled=True)
    monkeypatch.setattr(torch, "zeros", counted)
    for passes in (1, 2):
        (encoder.probe if probed else encoder.forward)(rows)
        assert len(made) == passes * filled  # probes ask for the floats of each layer, too


def different(made: list[Launch]) -> list[Launch]:
    """Returns one of all launches that are compiled to the same code."""
    found: dict[Any, Launch] = {}
    for launch in made:
        shapes = tuple(tuple(value.shape) if isinstance(value, Tensor) else value for value in launch.arguments.values())
        found.setdefault((launch.kernel.fn.__name__, str(shapes)), launch)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("model", "count_of_launches"), [("bert", 8), ("t5", 10), ("gated t5", 10)])
def test_every_launch_compiles_within_the_limits(
    model: str, count_of_launches: int, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = different(launches(base() if model == "bert" else t5(model == "gated t5"), dtype, monkeypatch))
    assert len(made) == count_of_launches
    for launch in made:
        binary = compiled(at_capability(launch, capability), capability)
        assert binary.over_limits() == []
        instructions = {"int8": INT8_MATRIX, "fp16": FP16_MATRIX, "fp32": ()}[launch.cost.unit]
        assert not instructions or count(binary.hot_loop, *instructions) > 0
        assert "div.full.f32" not in binary.ptx
