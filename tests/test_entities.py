"""Whole runs of the task token-classification, on a tiny model: every stage, predictions by word, flips, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.api import serve
from compress.commands.init import write_template
from compress.commands.load_test import evaluation_split
from compress.commands.verify import verify
from compress.pipeline import run
from compress.recipe import check, read
from foundation.core.errors import InputError, Problem
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.labels import tags
from foundation.labels.tasks import TASKS
from foundation.measure.answers import load_logits, load_predictions
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from tests import entities, without_clocks
from tests.docs.clients import ask
from tests.export import sentiment
from tests.report_keys import undocumented
from triton_repo.triton_repo import TritonRepo

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

TASK = "token-classification"
TARGET = {"engines": ["onnxruntime"], "batch_sizes": [1], "sequence_lengths": [16], "threads": 1}


def recipe(folder: Path, stages: list[Any], head: str = "new", engine: str = "onnxruntime") -> Any:
    data = entities.write(folder / "data", {"train": 340, "test": 60})
    model = {"path": str(entities.checkpoint()), "task": TASK, "head": head}
    target = {**TARGET, "engines": [engine]}
    given = {"name": "tiny", "model": model, "data": {"path": str(data), "max_length": 32}, "target": target, "stages": stages}
    return check(given)


def test_a_run_from_training_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [
        {"finetune": {"epochs": 4, "batch_size": 8, "learning_rate": 3e-3}},
        {"distill": {"student": {"layers": 1}, "epochs": 2, "batch_size": 8, "learning_rate": 3e-3}},
        {"prune": {"sparsity": 0.3, "rows": 64, "multiple_of": 8, "recover": {"epochs": 1, "batch_size": 8, "distill": True}}},
        {"quantize": {"mode": "qat", "calibration": {"rows": 64}, "qat": {"epochs": 1}}},
        {"export": {}},
        {"triton_repo": {"serve": False, "aggregation": "average"}},
    ]
    outcome = run(recipe(tmp_path, stages), tmp_path / "run", progress=ConsoleProgress("quiet"))
    report = outcome.report
    assert report["metric"] == {"name": "entity_f1", "higher_is_better": True, "chance": report["metric"]["chance"]}
    for variant in report["variants"]:
        assert list(variant["metrics"]["torch"]) == list(TASKS[TASK].metrics)
        assert variant["accuracy"]["torch"]["n"] == 60
        assert variant["accuracy"]["torch"]["value"] > 0.5
    assert undocumented(report) == []
    assert len(evaluation_split(tmp_path / "run")) == 60  # read again, as load tests do
    logits, labels = load_predictions(next((tmp_path / "run").glob("stages/evaluate-quantize-*/torch.safetensors")), "token-classification")
    assert (logits.shape, labels.array.dtype) == ((60, 32, 5), np.int32)
    repository = next((tmp_path / "run").glob("stages/triton_repo-*/model_repository"))
    assert Preprocessor.load(repository / "quantize-int8" / "1").response == "entities-average"
    tuned = Checkpoint(next((tmp_path / "run").glob("stages/finetune-*"))).config
    assert tuple(tuned.id2label.values()) == entities.NAMES
    lines = [json.loads(line) for line in (tmp_path / "run" / "flips.jsonl").read_text().splitlines()]
    first = load_logits(next((tmp_path / "run").glob("stages/evaluate-finetune-*/torch.safetensors")))
    flips = {(line["row"], line["position"]) for line in lines if line["variant"] == "quantize" and line["from"] == "baseline torch"}
    assert flips == {(row, word + 1) for row, word in np.argwhere(tags.choices(first) != tags.choices(logits)).tolist()}
    sentences = [json.loads(line) for line in (tmp_path / "data" / "test.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["of"] == sentences[line["row"]]["tokens"][line["position"] - 1]
        assert line["label"] == sentences[line["row"]]["labels"][line["position"] - 1]


@pytest.mark.slow
def test_a_served_model_answers_with_entities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [
        {"finetune": {"epochs": 4, "batch_size": 8, "learning_rate": 3e-3}},
        {"quantize": {"mode": "ptq", "calibration": {"rows": 64}}},
        {"export": {}},
        {"triton_repo": {}},
    ]
    run(recipe(tmp_path, stages, engine="openvino"), tmp_path / "run", progress=ConsoleProgress("quiet"))
    told = json.loads(next((tmp_path / "run").glob("stages/triton_repo-*/triton.json")).read_text())
    assert [model["disagreements"] for model in told["models"]] == [0] * len(told["models"])
    assert verify(tmp_path / "run", live=True, log=lambda line: None) == []
    with serve(tmp_path / "run") as server:
        _, answer = ask("docs/tutorials/entities.md", server, tmp_path)
    assert "ENTITIES" in {output["name"] for output in json.loads(answer)["outputs"]}


def test_a_head_that_is_kept_keeps_its_tags(tmp_path: Path) -> None:
    given = recipe(tmp_path, [{"quantize": {"calibration": {"rows": 64}}}], head="keep")
    outcome = run(given, tmp_path / "run", progress=ConsoleProgress("silent"))
    assert [variant["id"] for variant in outcome.report["variants"]] == ["baseline", "quantize"]


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (
            {"finetune": {"thresholds": True}},
            "stages.finetune.thresholds: given; it is for multi-label-classification or question-answering: leave it out",
        ),
        ({"distill": {"student": {"layers": 1}, "loss": "mixkd"}}, "mixkd needs one prediction per row, token-classification has many"),
        ({"distill": {"student": {"layers": 1}, "loss": "logit_standardization"}}, "logit_standardization needs one prediction per row"),
        ({"distill": {"student": {"layers": 1}, "augment": {}}}, "augment: given; token-classification does not support it"),
        ({"prune": {"granularity": ["vocabulary"], "sparsity": 0}}, "vocabulary given; labels belong to tokens of the incoming model"),
    ],
)
def test_what_a_stage_cannot_do_is_refused_in_one_line(stage: dict[str, Any], line: str, tmp_path: Path) -> None:
    stages = [stage] if "finetune" in stage else [{"finetune": {"epochs": 0.5}}, stage]
    with pytest.raises(InputError, match=line) as caught:
        run(recipe(tmp_path, stages), tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(caught.value.lines) == 1


def test_a_repository_for_gpus_is_refused(tmp_path: Path) -> None:
    context = sentiment.context(tmp_path, {"baseline": entities.checkpoint()}, Target(engines=("onnxruntime", "tensorrt")))
    with pytest.raises(InputError, match=f"answers with labels, {TASK} with tags: serve it on the cpu"):
        TritonRepo().check(None, None, replace(context, task=TASK))


def test_aggregation_is_for_tags_alone() -> None:
    given = TritonRepo(aggregation="average")
    assert list(given.unread(TASKS[TASK], Target())) == []
    assert list(given.unread(TASKS["text-classification"], Target())) == [Problem("aggregation", "average given", f"it is for {TASK}")]


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    read_back = read(write_template(TASK, tmp_path / "recipe.yaml"))
    assert (read_back.model.task, read_back.data.columns.tokens) == (TASK, "tokens")
    assert [stage.NAME for stage in read_back.stages] == ["finetune", "quantize", "export", "triton_repo"]
