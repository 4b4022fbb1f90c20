"""The parts that the time of an export is split into."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from compress.run import expected
from compress.run.expected import parts_of
from compress.run.implicit import Latency
from compress.run.pace import seconds_of_one
from compress.run.speed import Speed
from export.export import Export
from foundation.labels.tasks import TASKS
from foundation.stage.stage import Stage

MACS, LENGTH = 1_000_000.0, 100


def parts(engines: tuple[str, ...], task: str = "text-generation", rows: int = 1000, **generation: Any) -> dict[str, float]:
    """Of an export of two builds, with 50 evaluation rows."""
    return parts_of_step(Export.model_validate({"generation": generation}), engines, task, rows)


def latency(engines: tuple[str, ...], task: str = "text-generation") -> dict[str, float]:
    """Of the latency step of two builds."""
    return parts_of_step(Latency(), engines, task, 1000)


def parts_of_step(step: Stage, engines: tuple[str, ...], task: str, rows: int) -> dict[str, float]:
    split = SimpleNamespace(labels=SimpleNamespace(count=lambda: rows * (LENGTH - 1)))
    data = SimpleNamespace(selection=Rows(rows, split.labels), evaluation=Rows(50, split.labels), train=Rows(rows, split.labels))
    target = SimpleNamespace(engines=engines, batch_sizes=(1,), sequence_lengths=(LENGTH,))
    context: Any = SimpleNamespace(data=data, target=target, facts=TASKS[task], task=task, max_length=LENGTH)
    config = LlamaConfig(hidden_size=300, num_attention_heads=2)  # whose products take twice as long
    return parts_of(step, 0.0, MACS, config, 1.0, 1000, {}, context)


class Rows(list[int]):
    def __init__(self, count: int, labels: Any) -> None:
        super().__init__(np.zeros(count, int).tolist())
        self.labels = labels


@pytest.fixture(autouse=True)
def builds(monkeypatch: pytest.MonkeyPatch) -> None:
    floating, quantized = object(), object()
    monkeypatch.setattr(expected, "default_builds", lambda *_: [("fp32", floating), ("int8", quantized)])


def test_answers_of_torch_are_counted_for_each_build_and_those_of_engines_for_each_engine() -> None:
    found = parts(("openvino_genai", "onnxruntime_decoder"), prompts=200, tokens=64, questions="file")
    one = MACS / LENGTH
    assert found["answered"] == pytest.approx(4 * (64 * 200 + 32 * 32) * one)
    assert found["written"] == pytest.approx(2 * (64 * 200 + 32 * 32 + 64 * 8 + 32 * 32) * one)  # of the second checkpoint 8 answers
    assert found["engines"] == 4
    looked = 1.5 * 31  # blocks of 99 predictions
    assert found["macs"] == pytest.approx(4 * (50 + looked) * MACS)
    assert found["products"] == pytest.approx(2 * 1.5 * 2 * looked * MACS)
    assert parts(("openvino_genai",), prompts=200)["answered"] == parts(("openvino_genai",), prompts=50)["answered"]  # no more blocks


def test_a_float_model_in_halves_is_of_the_checkpoint_that_torch_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    two = parts(("openvino_genai",))
    floating, quantized = object(), object()
    monkeypatch.setattr(expected, "default_builds", lambda *_: [("fp32", floating), ("int8", quantized), ("bf16", floating)])
    three = parts(("openvino_genai",))
    assert (three["written"], three["products"]) == (two["written"], two["products"])
    assert (three["answered"], three["macs"]) == (pytest.approx(1.5 * two["answered"]), pytest.approx(1.5 * two["macs"]))


def test_the_loads_of_engines_that_answer_are_counted() -> None:
    found = latency(("openvino_genai", "openvino"))
    turns = {(32, 1): 4, (32, 4): 3, (32, 8): 3, (512, 1): 4, (512, 8): 2}
    one = MACS / LENGTH
    assert found["macs"] == pytest.approx(2 * one * sum((count + 1) * streams * prompt for (prompt, streams), count in turns.items()))
    assert found["answered"] == pytest.approx(2 * one * sum(count * max(4, streams) * 64 for (_, streams), count in turns.items()))
    assert "answered" not in latency(("openvino",), "text-classification")


def test_the_gate_asks_no_more_rows_than_there_are() -> None:
    few, many = (parts(("openvino_genai",), rows=rows)["products"] for rows in (20, 10_000))
    assert few == pytest.approx(2 * 1.5 * 2 * 20 * MACS)
    assert many == parts(("openvino_genai",))["products"]


def test_engines_that_do_not_answer_are_asked_no_prompts() -> None:
    found = parts(("openvino", "onnxruntime"))
    assert (found["written"], found["answered"], found["engines"]) == (0, 0, 6)


def test_other_tasks_have_no_such_parts_and_every_part_has_a_pace() -> None:
    encoder, decoder = parts(("openvino",), "text-classification"), parts(("openvino_genai",))
    assert set(encoder) == {"start", "builds", "bytes", "engines", "macs"}
    assert set(decoder) - set(encoder) == {"products", "written", "answered"}
    one = seconds_of_one("export", Speed(1e10, 1e10, 0.04, 1e9))
    assert all(one[name] > 0 for name in decoder)
