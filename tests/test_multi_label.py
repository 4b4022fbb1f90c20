"""Whole runs of the task multi-label-classification, on a tiny model: every stage, thresholds, flips, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.api import serve
from compress.commands.init import write_template
from compress.commands.verify import verify
from compress.pipeline import run
from compress.recipe import check, read
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.labels.tasks import TASKS
from foundation.measure.answers import load_logits, load_predictions
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from foundation.training.finetune import Finetune
from tests import without_clocks
from tests.docs.clients import ask
from tests.export import sentiment
from tests.once import made_once
from tests.problems import raises_problem
from tests.report_keys import undocumented

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

TASK = "multi-label-classification"
TARGET = {"engines": ["onnxruntime"], "batch_sizes": [1], "sequence_lengths": [8], "threads": 1}
NAMES = ("bad", "good", "long")


def labels_of(text: str) -> list[str]:
    """Returns labels that can be learned from the words."""
    words = text.split()
    return [name for name, holds in zip(NAMES, ("bad" in words, "good" in words, len(words) > 5), strict=True) if holds]


def recipe(folder: Path, stages: list[Any], layers: int = 1) -> Any:
    data = folder / "data"
    data.mkdir()
    texts = iter(sentiment.rows(400))
    for split, count in {"train": 340, "test": 60}.items():
        rows = [{"text": text, "label": labels_of(text)} for _, text in zip(range(count), texts, strict=False)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"path": str(sentiment.checkpoint(layers)), "task": TASK, "head": "new"}
    given = {"name": "tiny", "model": model, "data": {"path": str(data), "max_length": 16}, "target": TARGET, "stages": stages}
    return check(given)


SHORT: list[Any] = [{"finetune": {"epochs": 2, "learning_rate": 1e-3}}, {"quantize": {"mode": "ptq", "calibration": {"rows": 64}}}]
LONG: list[Any] = [
    SHORT[0],
    {"distill": {"student": {"layers": 1}, "epochs": 0.5}},
    {"prune": {"sparsity": 0.3, "rows": 64, "multiple_of": 8, "recover": {"epochs": 0.5, "distill": True}}},
    {"quantize": {"mode": "qat", "calibration": {"rows": 64}, "qat": {"epochs": 0.5}}},
]
"""`test_entities` takes these stages in every test run."""


def whole(folder: Path, stages: list[Any], layers: int) -> Path:
    """Makes a run in a folder; returns the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foundation.measure.latency.measure", without_clocks.measure)
        stages = [*stages, {"export": {}}, {"triton_repo": {"serve": False}}]
        return run(recipe(folder, stages, layers), folder / "run", progress=ConsoleProgress("quiet")).folder


def finished_run(factory: pytest.TempPathFactory) -> Path:
    """Returns the run with the short stages, made once for all tests, which leave it alone; for modules with `engines_inside`."""
    made: Path = made_once(factory, "multi-label run", lambda folder: whole(folder, SHORT, 1))
    return made


@pytest.mark.parametrize(("stages", "layers"), [(SHORT, 1), pytest.param(LONG, 2, marks=pytest.mark.slow)], ids=["short", "long"])
def test_a_run_from_training_to_the_repository(
    stages: list[Any], layers: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = finished_run(tmp_path_factory) if stages is SHORT else whole(tmp_path, stages, layers)
    report = json.loads((folder / "report.json").read_text())
    assert report["metric"] == {"name": "micro_f1", "higher_is_better": True, "chance": report["metric"]["chance"]}
    for variant in report["variants"]:
        assert list(variant["metrics"]["torch"]) == list(TASKS[TASK].metrics)
        assert variant["accuracy"]["torch"]["n"] == 60
    assert undocumented(report) == []
    logits, labels = load_predictions(next(folder.glob("stages/evaluate-quantize-*/torch.safetensors")), "multi-label-classification")
    assert (logits.shape, labels.array.shape, labels.array.dtype) == ((60, 3), (60, 3), np.bool_)
    repository = next(folder.glob("stages/triton_repo-*/model_repository"))
    config = (repository / "quantize-int8" / "config.pbtxt").read_text()
    assert config.count("dims: 3") == 3  # LABEL, SCORE, LOGITS
    assert Preprocessor.load(repository / "quantize-int8" / "1").response == "labels"
    tuned = Checkpoint(next(folder.glob("stages/finetune-*"))).config
    assert tuned.problem_type == "multi_label_classification"
    assert tuple(tuned.id2label.values()) == NAMES
    lines = [json.loads(line) for line in (folder / "flips.jsonl").read_text().splitlines()]
    first = load_logits(next(folder.glob("stages/evaluate-finetune-*/torch.safetensors")))
    flips = {(line["row"], line["of"]) for line in lines if line["variant"] == "quantize" and line["from"] == "baseline torch"}
    assert flips == {(row, NAMES[label]) for row, label in np.argwhere((first > 0) != (logits > 0)).tolist()}
    for line in lines:
        assert {line["before"], line["after"]} == {"yes", "no"}
        assert line["label"] == ("yes" if line["of"] in labels_of(line["input"]) else "no")


@pytest.mark.slow
def test_a_served_model_answers_with_every_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [
        {"finetune": {"epochs": 8, "learning_rate": 3e-3}},
        {"quantize": {"calibration": {"rows": 64}}},
        {"export": {}},
        {"triton_repo": {}},
    ]
    run(recipe(tmp_path, stages), tmp_path / "run", progress=ConsoleProgress("quiet"))
    told = json.loads(next((tmp_path / "run").glob("stages/triton_repo-*/triton.json")).read_text())
    assert [model["disagreements"] for model in told["models"]] == [0] * len(told["models"])
    assert verify(tmp_path / "run", live=True, log=lambda line: None) == []
    with serve(tmp_path / "run") as server:
        ask("docs/tutorials/multi-label.md", server, tmp_path, "tests/test_multi_label.py")
        ask("docs/tutorials/classifier.md", server, tmp_path)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (
            {"finetune": {"loss": "ranking"}},
            "stages.finetune.loss: ranking given; it is for .*, retrieval or sentence-triplets",
        ),
        (
            {"distill": {"student": {"layers": 1}, "loss": "logit_standardization"}},
            "logit_standardization given; the labels of multi-label-classification do not exclude each other: give soft_target",
        ),
    ],
)
def test_what_a_stage_cannot_do_is_refused_in_one_line(stage: dict[str, Any], line: str, tmp_path: Path) -> None:
    stages = [{"finetune": {"epochs": 0.5}}, stage] if "distill" in stage else [stage]
    with pytest.raises(InputError, match=line) as caught:
        run(recipe(tmp_path, stages), tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(caught.value.lines) == 1


def test_thresholds_are_for_sets_alone(tmp_path: Path) -> None:
    context = sentiment.context(tmp_path, {"baseline": sentiment.checkpoint()})
    with raises_problem("finetune.thresholds", "given", "multi-label-classification or question-answering", "leave it out"):
        Finetune(thresholds=True).check(Checkpoint(sentiment.checkpoint()).config, None, context)


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    read_back = read(write_template(TASK, tmp_path / "recipe.yaml"))
    assert read_back.model.task == TASK
    assert [stage.NAME for stage in read_back.stages] == ["finetune", "quantize", "export", "triton_repo"]
