"""Causal language models as ONNX graphs and engines: every position of every shape, and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM

from export.engines.spec import EngineSpec, torch_spec
from export.engines.worker import synthetic
from export.graph.macs import count_macs
from export.graph.onnx import export_float, module_of
from foundation.artifacts.graph import Graph
from foundation.labels.next_token import Tokens
from foundation.measure.agreement import compare_predictions, shortfall
from foundation.measure.engine_process import EngineProcess
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.size import count
from tests.foundation import tiny_gpt

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

(WINDOWED,) = tiny_gpt.SHALLOW
KINDS = ("gpt2", WINDOWED)


@cache
def exported(kind: str) -> Path:
    folder = tiny_gpt.checkpoint(kind).parent / f"{kind}-onnx"
    path = export_float(Checkpoint(tiny_gpt.checkpoint(kind)), tiny_gpt.prepared(kind), folder / "model.onnx")
    tiny_gpt.prepared(kind).save(folder)
    return path


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_position_equal_those_of_torch(kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt.checkpoint(kind)).eval()
    session = onnxruntime.InferenceSession(str(exported(kind)))
    random = np.random.default_rng(0)
    for batch, length in ((1, 2), (1, tiny_gpt.LENGTH), (3, 13), (7, 7)):
        ids = random.integers(0, tiny_gpt.VOCABULARY, (batch, length))
        with torch.no_grad():
            expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
        (logits,) = session.run(["logits"], {"input_ids": ids})
        assert logits.shape == (batch, length, tiny_gpt.VOCABULARY)
        assert expected.std() > 0.05  # or a difference would prove nothing
        np.testing.assert_allclose(logits, expected, atol=1e-4, err_msg=f"{kind} {batch} x {length}")


@pytest.mark.parametrize("kind", KINDS)
def test_what_pads_a_block_changes_nothing_before_it(kind: str) -> None:
    session = onnxruntime.InferenceSession(str(exported(kind)))
    block = np.arange(1, 6, dtype=np.int32)
    features = tiny_gpt.prepared(kind, lengths=(8,)).encode([block])
    assert features["input_ids"].shape == (1, 8)
    (alone,), (padded,) = (session.run(["logits"], given) for given in ({"input_ids": block[None].astype(np.int64)}, features))
    np.testing.assert_allclose(padded[:, :5], alone, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_has_one_input_and_names_its_layers(kind: str) -> None:
    graph = onnx.load(exported(kind)).graph
    [given], [answer] = graph.input, graph.output
    dims = [[dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in (given, answer)]
    assert (given.name, answer.name) == ("input_ids", "logits")
    assert dims == [["batch", "sequence"], ["batch", "sequence", tiny_gpt.VOCABULARY]]
    modules = {module_of(node) for node in graph.node if node.op_type in ("MatMul", "Gemm")}
    linears = {name for name, module in load(tiny_gpt.checkpoint(kind)).named_modules() if isinstance(module, torch.nn.Linear)}
    assert modules >= linears
    assert ("Where" in {node.op_type for node in graph.node}) == (kind == WINDOWED)  # a window that slides keeps its own mask
    stored = [tensor for tensor in graph.initializer if sorted(tensor.dims) == [32, tiny_gpt.VOCABULARY]]
    assert len(stored) == (1 if kind == "gpt2" else 2)  # a tied head is stored once


@pytest.mark.parametrize("kind", KINDS)
def test_macs_are_those_of_torch_with_the_head(kind: str) -> None:
    gemms = count_macs(Graph(exported(kind)), 1, tiny_gpt.LENGTH)
    [head] = [gemm for gemm in gemms if gemm.name == "lm_head"]
    assert (head.kind, head.node, head.macs) == ("weight", "lm_head/MatMul", tiny_gpt.LENGTH * 32 * tiny_gpt.VOCABULARY)
    counted = count(load(tiny_gpt.checkpoint(kind)), "text-generation", tiny_gpt.LENGTH)
    assert counted.macs == sum(gemm.macs for gemm in gemms)
    assert counted.parameters == sum(parameter.numel() for parameter in load(tiny_gpt.checkpoint(kind)).parameters())


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineProcess]]:
    from export.engines import openvino

    folder = exported(WINDOWED).parent
    xml, _ = openvino.convert(folder / "model.onnx", folder)
    specs = [
        EngineSpec("onnxruntime", "dynamic", "fp32", "fp32", "cpu", 1, str(folder / "model.onnx"), str(folder), (1, 4)),
        EngineSpec("openvino", "static", "fp32", "fp32", "cpu", 1, str(xml), str(folder), (1, 4)),
    ]
    processes = [EngineProcess(spec) for spec in specs]
    yield processes
    for process in processes:
        process.close()


def test_engines_keep_two_numbers_for_each_token(engines: list[EngineProcess]) -> None:
    split = tiny_gpt.data().evaluation
    reference = predict(load(tiny_gpt.checkpoint(WINDOWED)), tiny_gpt.prepared(WINDOWED), split.rows, 32)
    assert reference.shape == (len(split), tiny_gpt.LENGTH - 1, 2)
    for process in engines:
        answers = process.predict(split.rows, 4)
        np.testing.assert_allclose(answers[..., 0], reference[..., 0], atol=1e-4)
        found = compare_predictions("text-generation", reference, answers, split.labels)
        assert (found["passed"], found["n"], found["differs"]) == (True, (split.labels.array >= 0).sum(), "nll")
        assert process.ask("measure", batch=1, sequence=8, least=1, most=1, seconds=0)["samples_ms"]


def test_openvino_tells_the_precision_of_every_product(engines: list[EngineProcess]) -> None:
    nodes = [gemm.node for gemm in count_macs(Graph(exported(WINDOWED)), 4, tiny_gpt.LENGTH)]
    told = engines[1].ask("precisions", gemms=nodes, batch=4, sequence=tiny_gpt.LENGTH)["precisions"]
    assert told == dict.fromkeys(nodes, "fp32")


def test_torch_is_an_engine_too() -> None:
    folder = exported("gpt2").parent
    split = tiny_gpt.data().evaluation
    from export.engines.torch import Torch
    from foundation.core.target import Target

    engine = Torch(torch_spec(Checkpoint(tiny_gpt.checkpoint()), folder, "fp32", Target(threads=1)))
    features = tiny_gpt.prepared().encode(split.rows[:2])
    session = onnxruntime.InferenceSession(str(exported("gpt2")))
    np.testing.assert_allclose(engine.predict(features), session.run(["logits"], dict(features))[0], atol=1e-4)
    assert list(synthetic(tiny_gpt.prepared(), 2, 8)) == ["input_ids"]


def test_the_gate_counts_tokens() -> None:
    labels = Tokens(np.zeros((50, 100), np.int32))
    reference = np.zeros((50, 100, 2), np.float32)
    one_in_a_thousand, too_many, apart = reference.copy(), reference.copy(), reference.copy()
    one_in_a_thousand[:5, 0, 1] = too_many[:50, 0, 1] = 3
    apart[..., 0] += 0.03
    found = [compare_predictions("text-generation", reference, answers, labels) for answers in (one_in_a_thousand, too_many, apart)]
    assert [entry["disagreements"] for entry in found] == [5, 50, 0]
    assert [entry["passed"] for entry in found] == [True, False, False]
    assert {entry["n"] for entry in found} == {5000}
    assert "50 of 5000 predictions differ from torch" in str(shortfall(found[1], "torch"))
    assert "median |dnll| 0.0300 (at most 0.02)" in str(shortfall(found[2], "torch"))
