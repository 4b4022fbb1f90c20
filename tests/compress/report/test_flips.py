"""Flips of tokens: each of them once, told as text that the tokenizer gives."""

from __future__ import annotations

import json
from inspect import isabstract
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compress.report import evaluations
from compress.report.evaluations import Behind, Evaluation
from compress.report.flips.flips import DESCRIBED_BY, write_flips
from compress.report.flips.tokens import TokenFlips
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.exported import Build
from foundation.artifacts.run_folder import Run
from foundation.artifacts.triton import Results, TritonModel
from foundation.data.splits import Data, Split
from foundation.labels import captions
from foundation.labels.classes import ClassIds
from foundation.labels.form import Labels
from foundation.labels.next_token import NO_CHOICE
from foundation.labels.value import Numbers
from foundation.measure.answers import save_predictions
from tests.foundation import tiny_gpt


def answers(changes: dict[tuple[int, int], int]) -> np.ndarray:
    """Returns what a model answers that holds token 5 likeliest everywhere, but other tokens at some places."""
    split = tiny_gpt.data().evaluation
    found = np.zeros((len(split), tiny_gpt.LENGTH - 1, 2), np.float32)
    found[..., 1] = np.where(split.labels.array >= 0, 5, NO_CHOICE)
    for place, token in changes.items():
        found[(*place, 1)] = token
    return found


def test_changed_tokens_are_told_with_what_stands_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_gpt.data()
    baseline, quantized, engine = answers({}), answers({(0, 0): 7, (2, 4): 9}), answers({(0, 0): 7})
    rows = [("baseline", "torch", baseline), ("quantize", "torch", quantized), ("quantize", "openvino", engine)]
    found = [Evaluation(variant, backend, "", "", logits, data.evaluation.labels, {}) for variant, backend, logits in rows]
    monkeypatch.setattr("compress.report.flips.flips.evaluations", lambda run: iter(found))
    checkpoint = Artifact(tiny_gpt.checkpoint(), {})
    recipe: Any = {"model": {"task": "text-generation"}}
    run = Run(tmp_path, recipe, (), {}, {"baseline": checkpoint, "evaluate-baseline": checkpoint})
    assert write_flips(run, data) == 3
    lines = [json.loads(line) for line in (tmp_path / "flips.jsonl").read_text().splitlines()]
    decode = TokenFlips(tiny_gpt.checkpoint(), data, data.evaluation.labels).tokenizer.decode
    block = [int(token) for token in data.evaluation.rows[2]]  # type: ignore[union-attr]
    places = [(line["row"], line["position"], line["variant"], line["from"], line["to"]) for line in lines]
    assert places == [
        (0, 1, "quantize", "baseline torch", "torch"),
        (2, 5, "quantize", "baseline torch", "torch"),
        (2, 5, "quantize", "torch", "openvino"),
    ]
    assert (lines[1]["before"], lines[1]["after"], lines[1]["label"]) == (decode([5]), decode([9]), decode([block[5]]))
    assert lines[1]["input"] == decode(block[:5])
    assert (lines[2]["before"], lines[2]["after"]) == (decode([9]), decode([5]))


def test_a_server_is_compared_with_the_engine_that_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ClassIds(np.zeros(3, np.int64))
    split = Split(["a", "b", "c"], labels)
    zeros, first, second = (np.eye(2, dtype=np.float32)[list(found)] for found in ((0, 0, 0), (1, 0, 0), (0, 1, 0)))
    save_predictions(tmp_path / "static", first, labels)
    rows = [("torch", zeros, None), ("openvino", zeros, None), ("onnxruntime", second, None)]
    rows.append(("triton", first, Behind("openvino", tmp_path / "static")))
    found = [Evaluation("baseline", backend, "", "", logits, labels, {}, behind=behind) for backend, logits, behind in rows]
    monkeypatch.setattr("compress.report.flips.flips.evaluations", lambda run: iter(found))
    recipe: Any = {"model": {"task": "text-classification"}}
    assert write_flips(Run(tmp_path, recipe, (), {}, {}), Data(split, split, split, ("a", "b"))) == 1
    assert [(line["from"], line["to"]) for line in map(json.loads, (tmp_path / "flips.jsonl").read_text().splitlines())] == [
        ("openvino", "onnxruntime")
    ]


@pytest.mark.parametrize("mode", ["static", "dynamic", "compiled"])
def test_a_served_model_is_found_among_the_engines_by_its_mode(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [{"engine": "openvino", "mode": one, "predictions": one} for one in ("dynamic", "static")]
    build = Build.model_validate({"variant": "baseline", "precision": "int8", "engines": engines})
    model = {"variant": "baseline", "precision": "int8", "engine": "openvino", "mode": mode, "predictions": "served"}
    here = Artifact(tmp_path, {"metrics": {"metrics": {}}})
    run = SimpleNamespace(
        variants=["baseline"], artifacts={"evaluate-baseline": here}, of_kind=lambda kind: here, predictions=lambda name: tmp_path / name
    )
    monkeypatch.setattr(evaluations, "exported", lambda run: SimpleNamespace(builds=[build]))
    monkeypatch.setattr(evaluations, "served", lambda run: [TritonModel.model_validate(model)])
    *others, last = evaluations.stored(run)  # type: ignore[arg-type]
    assert [one.behind for one in others] == [None, None]
    assert last.behind == (None if mode == "compiled" else Behind("openvino", tmp_path / mode))


def test_the_flips_of_every_form_are_described() -> None:
    forms: set[type[Labels]] = {Labels}
    while more := {below for form in forms for below in form.__subclasses__()} - forms:
        forms |= more
    judged = {form for form in forms if not isabstract(form) and form.KNOWN}
    assert judged - {ClassIds, Numbers} == {*DESCRIBED_BY}


def test_an_image_and_a_caption_that_find_another_one_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = [b"first", b"second", "a five", "a six", "a five"]
    numbers, sides = np.array([0, 1, 0, 1, 1]), np.array([0, 0, 1, 1, 1])
    split = Split(rows, captions.labels_of(sides, numbers))
    before = np.array([[1, 0], [0, 1], [1, 0.1], [0.1, 1], [1, 0.1]], np.float32)
    after = np.array([[1, 0], [1, 0], [1, 0.1], [0.1, 1], [0.1, 1]], np.float32)
    after[1] = [0.9, -0.3]
    found = [Evaluation("a", "torch", "", "", before, split.labels, {}), Evaluation("b", "torch", "", "", after, split.labels, {})]
    monkeypatch.setattr("compress.report.flips.flips.evaluations", lambda run: iter(found))
    recipe: Any = {"model": {"task": "image-text-retrieval"}}
    assert write_flips(Run(tmp_path, recipe, (), {}, {}), Data(split, split, split, ())) == 2
    image, caption = (json.loads(line) for line in (tmp_path / "flips.jsonl").read_text().splitlines())
    told = {"variant": "b", "from": "baseline torch", "to": "torch", "label": None}
    assert image == {
        "row": 1,
        "before": "a six",
        "after": "a five",
        "right_before": True,
        "right_after": False,
        "input": "image of row 1: a six",
        **told,
    }
    assert caption == {
        "row": 3,
        "before": "image of row 1: a six",
        "after": "image of row 0: a five",
        "right_before": True,
        "right_after": False,
        "input": "a six",
        **told,
    }


def test_what_was_written_for_gpus_is_told_with_the_reason_why_it_was_not_run(tmp_path: Path) -> None:
    made = Artifact(tmp_path, {"digest": "0"})
    run: Any = SimpleNamespace(of_kind=lambda kind: made if kind == "model_repository" else None)
    assert evaluations.repository(run) == Results()
    document = {"models": [{"model": "a"}], "gpu": {"model": "b", "reason": "not run: no GPU"}}
    (tmp_path / "triton.json").write_text(json.dumps(document))
    assert [model.written() for model in evaluations.served(run)] == [{"model": "a"}]
    assert [model.written() for model in evaluations.repository(run).additional] == [{"model": "b", "reason": "not run: no GPU"}]
