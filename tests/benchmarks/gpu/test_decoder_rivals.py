"""GPT-2 against torch: the step of torch is Transformers' model, what fails stops nothing else, and the rehearsal is the whole of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import decoder_rivals
from benchmarks.gpu.decoder_rivals import ATLEAST, MODEL, RIVALS, Gpt, Rival, StepGpt, eager_gpt
from benchmarks.gpu.rivals import REHEARSED, verdicts
from benchmarks.gpu.squad import Machine
from benchmarks.gpu.timing import OnHost

TINY = Gpt(width=32, inner=64, layers=2, heads=2, words=50, positions=16)
CPU = Machine(torch.device("cpu"), lambda work: pytest.fail("nothing is recorded"), lambda: None, dtype=torch.float32, clock=lambda: 0.0)


@torch.inference_mode()
def test_a_step_of_torch_is_that_of_transformers_model() -> None:
    torch.manual_seed(0)
    model: Any = eager_gpt(TINY, CPU.device, torch.float32)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(50, (3, 8))
    whole = model(input_ids=ids, use_cache=False).logits[:, -1]
    past = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
    step: Any = StepGpt(model, 3, 7)
    for number, layer in enumerate(past.layers):
        step.cache[number, 0, :, :, :7], step.cache[number, 1, :, :, :7] = layer.keys, layer.values
    torch.testing.assert_close(step(ids[:, -1]), whole, rtol=1e-4, atol=1e-4)


class Ours:
    """Our side, without kernels; one of its shapes fails."""

    def __init__(self, gpt: Gpt, machine: Machine) -> None: ...

    def read(self, *shape: int) -> Callable[[], Any]:
        return lambda: shape

    def step(self, *shape: int) -> Callable[[], Any]:
        if shape == (4, 4):
            raise RuntimeError("no\nroom")
        return lambda: shape


def test_what_fails_has_a_reason_and_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rival: Rival, kind: str, *_: Any) -> Callable[[], Any]:
        if rival == RIVALS[0] and kind == "read":
            raise RuntimeError("out of memory")
        return lambda: None

    monkeypatch.setattr(decoder_rivals, "Ours", Ours)
    monkeypatch.setattr(decoder_rivals, "rival_work", work)
    monkeypatch.setattr(decoder_rivals, "in_turns", lambda works, gpu: {name: [4.0 if name == "rival" else 2.0] for name in works})
    shapes = {"read": ((2, 8),), "step": ((1, 4), (4, 4))}
    found = decoder_rivals.compare(TINY, CPU, OnHost(), REHEARSED, shapes)
    assert [(row["shape"], row["rival"]) for row in found["times"]] == [
        (shape, rival.name) for shape in ("read, 2 x 8", "step, 1 x 4", "step, 4 x 4") for rival in RIVALS
    ]
    assert [row["reason"] for row in found["times"]] == [
        "RuntimeError: out of memory", None, None, None, None, None, *["RuntimeError: no room"] * 3,
    ]  # fmt: skip
    assert {row["speedup"] for row in found["times"] if row["reason"] is None} == {2.0}
    told = {line.line: line.word for line in verdicts(found, MODEL, ATLEAST)}
    assert told[f"read, 2 x 8, against {RIVALS[1].name}"] == "passed"
    assert told["step, 4 x 4, against the fastest rival"] == "not measured"


def test_after_its_time_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_rivals, "Ours", Ours)
    monkeypatch.setattr(decoder_rivals, "rival_work", lambda *_: pytest.fail("begun"))
    found = decoder_rivals.compare(TINY, CPU, OnHost(), REHEARSED, {"read": ((2, 8),)}, seconds=-1.0)
    assert all(row["ms"] is None and "time of the comparison was over" in row["reason"] for row in found["times"])


@pytest.mark.slow
@pytest.mark.timeout(1800)  # half a minute of one processor, which others may hold
def test_the_rehearsal_measures_every_rival(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.figures", str(tmp_path / "gpt.json"), "--only", "decoders", "--rehearse"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "gpt.json").read_text())
    assert len(found["times"]) == 2 * len(RIVALS)
    assert all(row["reason"] is None and row["ms"] > 0 and row["ours_ms"] > 0 for row in found["times"])
    assert {line["model"] for line in found["verdicts"]} == {MODEL}
    assert all(rival.name in done.stdout for rival in RIVALS)
