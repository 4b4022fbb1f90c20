"""TensorRT among the rivals: our graphs are built and answer as torch does, on the stand-in; what is missing has a reason in every row."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from benchmarks.gpu import rivals, tensorrt_rival
from benchmarks.gpu.squad import Bert, Machine
from benchmarks.gpu.tensorrt_rival import PRECISIONS, Rows, TorchDevice
from benchmarks.gpu.timing import OnHost

TINY = Bert(width=64, inner=64, layers=1, heads=2, words=50, positions=16)
SHAPES = ((2, 8), (1, 8))
WORKS = {shape: (lambda: None) for shape in SHAPES}


def machine() -> Machine:
    record: Any = lambda work: SimpleNamespace(replay=work)  # noqa: E731  as in a rehearsal
    return Machine(torch.device("cpu"), record, lambda: None, dtype=torch.float32)


def rows_of(monkeypatch: pytest.MonkeyPatch, answering: Callable[..., Any]) -> list[dict[str, Any]]:
    monkeypatch.setattr(tensorrt_rival, "absence", lambda: None)
    monkeypatch.setattr(tensorrt_rival, "answering", answering)
    monkeypatch.setattr(rivals, "in_turns", lambda works, gpu: {"ours": [2.0], "rival": [works["rival"]()]})
    return list(rivals.by_tensorrt(WORKS, TINY, machine(), OnHost(), False))


def test_a_missing_package_is_the_reason_of_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorrt" else object())
    found = list(rivals.by_tensorrt(WORKS, TINY, machine(), OnHost(), False))
    assert [row["rival"] for row in found] == [name for name in PRECISIONS for _ in SHAPES]
    assert {row["reason"] for row in found} == {"not installed: tensorrt"}
    assert {row["ms"] for row in found} == {None}


def test_plans_are_measured_and_one_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = PRECISIONS

    def answering(*_: Any) -> Any:
        yield first, {shape: lambda: 3.0 for shape in SHAPES}, "a note"
        raise RuntimeError("half.onnx does not\ncompile")

    found = rows_of(monkeypatch, answering)
    assert [(row["rival"], row["speedup"], row["reason"]) for row in found] == [
        *[(first, 1.5, "a note")] * 2,
        *[(second, None, "RuntimeError: half.onnx does not compile")] * 2,
    ]


def test_nothing_is_begun_when_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_rival, "absence", lambda: None)
    monkeypatch.setattr(tensorrt_rival, "answering", lambda *_: pytest.fail("a plan is built"))
    assert all(row["reason"] for row in rivals.by_tensorrt(WORKS, TINY, machine(), OnHost(), True))


@pytest.mark.slow
@pytest.mark.whole
def test_our_graphs_are_built_and_answer(tmp_path: Path) -> None:
    stand_in = pytest.importorskip("tests.export.tensorrt_stand_in")
    trt, ids = stand_in.StandIn(), np.random.default_rng(1).integers(4, 50, (2, 8))
    logits = {}
    for name, plan, note in tensorrt_rival.plans(trt, TINY, SHAPES, tmp_path):
        rows = Rows(trt, plan, TorchDevice(torch.device("cpu"), lambda: 77), ids)
        rows.run()
        logits[name] = rows.logits
        assert note in (None, tensorrt_rival.NOT_FUSED)
    assert set(logits) == set(PRECISIONS)
    found, exact = logits["TensorRT, int8 and fp16"], logits["TensorRT, fp16"]
    assert found.shape == exact.shape == (2, 2)
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, atol=0.1)
    int8 = onnx.load(tmp_path / "int8" / "half.onnx").graph
    assert sum(node.op_type == "DequantizeLinear" for node in int8.node) >= 6
    assert not any(node.op_type == "QuantizeLinear" for node in onnx.load(tmp_path / "float" / "half.onnx").graph.node)
