"""The parts that the time of an export is split into."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from compress.run import expected
from compress.run.expected import parts_of
from compress.run.pace import seconds_of_one
from compress.run.speed import Speed
from export.export import Export
from foundation.labels.tasks import TASKS

MACS, LENGTH = 1_000_000.0, 100


def parts(engines: tuple[str, ...], task: str = "text-generation", rows: int = 1000, **generation: Any) -> dict[str, float]:
    """Of two builds, with 50 evaluation rows."""
    split = SimpleNamespace(labels=SimpleNamespace(count=lambda: rows * (LENGTH - 1)))
    data = SimpleNamespace(selection=Rows(rows, split.labels), evaluation=Rows(50, split.labels), train=Rows(rows, split.labels))
    context: Any = SimpleNamespace(data=data, target=SimpleNamespace(engines=engines), facts=TASKS[task], max_length=LENGTH)
    config = LlamaConfig(hidden_size=300, num_attention_heads=2)  # whose products take twice as long
    return parts_of(Export.model_validate({"generation": generation}), 0.0, MACS, config, 1.0, 1000, {}, context)


class Rows(list[int]):
    def __init__(self, count: int, labels: Any) -> None:
        super().__init__(np.zeros(count, int).tolist())
        self.labels = labels


@pytest.fixture(autouse=True)
def builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "default_builds", lambda *_: [None, None])


def test_answers_of_torch_are_counted_for_each_build_and_those_of_engines_for_each_engine() -> None:
    found = parts(("openvino_genai", "onnxruntime_decoder"), prompts=200, tokens=64, questions="file")
    tokens = 64 * (200 + 32) * MACS / LENGTH
    assert found["answered"] == pytest.approx(4 * tokens)
    assert found["written"] == pytest.approx(2 * 2 * tokens)
    assert found["engines"] == 4
    looked = 1.5 * 70  # blocks of 99 predictions
    assert found["macs"] == pytest.approx(4 * (50 + looked) * MACS)
    assert found["products"] == pytest.approx(2 * 1.5 * 2 * looked * MACS)
    assert parts(("openvino_genai",), prompts=200)["answered"] == parts(("openvino_genai",), prompts=50)["answered"]  # no more blocks


def test_the_gate_asks_no_more_rows_than_there_are() -> None:
    few, many = (parts(("openvino_genai",), rows=rows)["products"] for rows in (40, 10_000))
    assert few == pytest.approx(2 * 1.5 * 2 * 40 * MACS)
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
