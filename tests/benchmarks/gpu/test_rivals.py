"""The comparison with torch: its packed model is Transformers', what fails stops nothing else, and the rehearsal is the whole of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from benchmarks.gpu import rivals, tensorrt_rival
from benchmarks.gpu.against_torch import eager_bert
from benchmarks.gpu.rivals import RIVALS, PackedBert, Rival, by_mask, table, verdicts
from benchmarks.gpu.squad import Bert, Machine
from benchmarks.gpu.timing import OnHost
from export.fused.rows import Limits, filled, pack
from tests.export.fused import encoders

TINY = Bert(width=32, inner=64, layers=2, heads=2, words=50, positions=16)
CPU = Machine(torch.device("cpu"), lambda work: pytest.fail("nothing is recorded"), lambda: None, dtype=torch.float32)


@torch.inference_mode()
def test_packed_rows_have_the_logits_of_transformers_model() -> None:
    torch.manual_seed(0)
    model = eager_bert(TINY, "cpu", torch.float32)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    given = encoders.features(5, kinds=True)
    rows = pack(given, Limits(50, 2, 16, 0))
    expected = model(**encoders.tensors(given)).logits
    for some in (rows, filled(rows, len(rows.word) + 7, 8)):
        found = PackedBert(model, by_mask)(some.word, some.kind, some.position, some.start, some.first)
        torch.testing.assert_close(found[:5], expected, rtol=1e-4, atol=1e-5)


class Ours:
    """Our side, without kernels: rows of a shape are the shape, and passes return it."""

    by_shape = MappingProxyType({(2, 8): "2 x 8", (1, 4): "1 x 4"})

    def work(self, rows: Any) -> Callable[[], Any]:
        return lambda: rows

    def first_batch(self) -> Any:
        return "a batch"

    def recorded(self) -> Callable[[Any], Any]:
        return lambda rows: rows

    def filling(self, forward: Any) -> Any:
        return forward

    def rate(self, forward: Any) -> float:
        forward("batch")
        return 300.0


def compared(monkeypatch: pytest.MonkeyPatch, passes: Callable[[Rival], Any], clock: Callable[[], float] = lambda: 0.0) -> dict[str, Any]:
    monkeypatch.setattr(rivals, "pass_of", lambda rival, *_: passes(rival))
    monkeypatch.setattr(rivals, "in_turns", lambda works, gpu: {name: [4.0 if name == "rival" else 2.0] for name in works})
    monkeypatch.setattr(rivals, "attention_alone", lambda named, *_: [])
    monkeypatch.setattr(rivals, "by_tensorrt", lambda *_: [])
    machine = Machine(torch.device("cpu"), lambda work: pytest.fail("nothing is recorded"), lambda: None, clock=clock)
    ours: Any = Ours()
    return rivals.compare(ours, TINY, machine, OnHost(), seconds=10.0)


def test_what_fails_has_a_reason_and_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def passes(rival: Rival) -> Any:
        if rival.torchao:
            raise ModuleNotFoundError("No module named 'torchao'")

        def forward(rows: Any) -> Any:
            if rows == "1 x 4" and rival == RIVALS[0]:
                raise RuntimeError("out of\nmemory")

        return forward

    found = compared(monkeypatch, passes)
    assert len(found["times"]) == 2 * len(RIVALS)
    assert len(found["rates"]) == sum(rival.packed for rival in RIVALS)
    failed = {(row["rival"], row["shape"]): row["reason"] for row in found["times"] if row["ms"] is None}
    assert failed == {
        (RIVALS[0].name, "1 x 4"): "RuntimeError: out of memory",
        **{(RIVALS[3].name, shape): "ModuleNotFoundError: No module named 'torchao'" for shape in ("2 x 8", "1 x 4")},
    }
    assert {row["speedup"] for row in found["times"] if row["ms"] is not None} == {2.0}
    words = {line.line: line.word for line in verdicts(found)}
    assert words[f"2 x 8, against {RIVALS[0].name}"] == "passed"
    assert words[f"1 x 4, against {RIVALS[0].name}"] == "told"
    assert all(rival.name in table(found) for rival in RIVALS)


def test_after_its_time_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[float] = iter([0.0, 5.0, *[11.0] * 20])
    begun: list[str] = []

    def passes(rival: Rival) -> Any:
        begun.append(rival.name)
        return lambda rows: rows

    found = compared(monkeypatch, passes, lambda: next(ticks))
    assert begun == [RIVALS[0].name]
    assert all(row["ms"] is None and "10 seconds" in row["reason"] for row in found["times"][2:])


def test_only_the_fastest_rival_of_a_shape_is_judged() -> None:
    def row(name: str, speedup: float | None) -> dict[str, Any]:
        return {"rival": name, "shape": "1 x 4", "ms": 1.0, "ours_ms": 1.0, "speedup": speedup, "reason": None}

    words = {line.line: line.word for line in verdicts({"times": [row("a", 2.0), row("b", 0.9), row("c", None)], "rates": []})}
    assert words == {"1 x 4, against a": "told", "1 x 4, against b": "missed", "1 x 4, against c": "told"}
    (line,) = [line for line in verdicts({"times": [row("a", None)], "rates": []}) if line.limit is not None]
    assert line.word == "not measured"


@pytest.mark.slow
@pytest.mark.whole
def test_the_rehearsal_measures_every_rival_and_writes_the_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.figures", str(tmp_path / "rivals.json"), "--only", "rivals", "--rehearse"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "rivals.json").read_text())
    reasons = {row["rival"]: row["reason"] for row in (*found["times"], *found["rates"]) if row["reason"] is not None}
    assert set(reasons) <= {"torchao int8, packed", *tensorrt_rival.PRECISIONS}  # where they are not installed
    assert all(reasons[name] == "not installed: tensorrt" for name in tensorrt_rival.PRECISIONS if name in reasons)
    alone = [row for row in found["times"] if row["rival"] == rivals.VARLEN]
    assert [row["shape"] for row in alone] == ["attention, 2 x 8", "attention, 1 x 4", "attention, lengths of SQuAD"]
    assert len(found["times"]) == 2 * (len(RIVALS) + len(tensorrt_rival.PRECISIONS)) + len(alone)
    assert {line["verdict"] for line in found["verdicts"]} <= {"passed", "missed", "told"}
    assert all(rival.name in done.stdout for rival in RIVALS)
    refused = subprocess.run([*command[:-3], "--rehearse"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
