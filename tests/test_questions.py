"""Whole runs of the task question-answering on a tiny model: every stage, predictions by window, flips by question, what is refused."""

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
from compress.report.evaluations import read_golden
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.labels import spans
from foundation.labels.tasks import TASKS
from foundation.measure.answers import load_logits, load_predictions
from foundation.models.config import set_labels
from foundation.models.folder import Checkpoint
from foundation.models.heads.reader import THRESHOLD_KEY
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.windows import Window
from tests import questions, without_clocks
from tests.docs.clients import ask
from tests.export import sentiment
from tests.report_keys import undocumented
from triton_repo.triton_repo import TritonRepo

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

TASK = "question-answering"
TARGET = {"engines": ["onnxruntime"], "batch_sizes": [1], "sequence_lengths": [16], "threads": 1}
FINETUNE = {"finetune": {"epochs": 6, "batch_size": 8, "learning_rate": 3e-3}}


def recipe(folder: Path, stages: list[Any], layers: int = 1, head: str = "new", engine: str = "onnxruntime", **data: Any) -> Any:
    path = questions.write(folder / "data", {"train": 400, "test": 60}, unanswerable=data.pop("unanswerable", 0.3))
    model = {"path": str(questions.checkpoint(layers)), "task": TASK, "head": head}
    target = {**TARGET, "engines": [engine]}
    given = {"path": str(path), "max_length": questions.LENGTH, "stride": 12, **data}
    return check({"name": "tiny", "model": model, "data": given, "target": target, "stages": stages})


@pytest.mark.slow
def test_a_run_from_training_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [
        FINETUNE,
        {"distill": {"student": {"layers": 1}, "epochs": 2, "batch_size": 8, "learning_rate": 3e-3}},
        {"prune": {"sparsity": 0.3, "rows": 64, "multiple_of": 8, "recover": {"epochs": 1, "batch_size": 8, "distill": True}}},
        {"quantize": {"mode": "qat", "calibration": {"rows": 64}, "qat": {"epochs": 1}}},
        {"export": {}},
        {"triton_repo": {"serve": False}},
    ]
    outcome = run(recipe(tmp_path, stages, layers=2), tmp_path / "run", progress=ConsoleProgress("quiet"))
    report = outcome.report
    assert report["metric"] == {"name": "answer_f1", "higher_is_better": True, "chance": report["metric"]["chance"]}
    for variant in report["variants"]:
        assert list(variant["metrics"]["torch"]) == list(TASKS[TASK].metrics)
        assert variant["accuracy"]["torch"]["n"] == 60
        assert variant["accuracy"]["torch"]["value"] > 0.8
    assert undocumented(report) == []
    rows = check_answers(tmp_path / "run", "quantize")
    assert len(rows) > 60
    assert read_golden(tmp_path / "run" / "golden.safetensors")[0][0] in rows
    repository = next((tmp_path / "run").glob("stages/triton_repo-*/model_repository"))
    prepared = Preprocessor.load(repository / "quantize-int8" / "1")
    tuned = Checkpoint(next((tmp_path / "run").glob("stages/finetune-*"))).config
    assert (prepared.response, prepared.stride, prepared.null_threshold) == ("span", 12, getattr(tuned, THRESHOLD_KEY))


@pytest.mark.slow
def test_a_short_run_measures_questions_and_tells_whose_answers_changed(tmp_path: Path) -> None:
    student = {"student": {"layers": 1}, "epochs": 0.5, "batch_size": 8, "learning_rate": 3e-3, "loss": "soft_target"}
    stages = [{"finetune": {**FINETUNE["finetune"], "epochs": 1}}, {"distill": student}]
    outcome = run(recipe(tmp_path, stages, layers=2, unanswerable=0.6), tmp_path / "run", progress=ConsoleProgress("quiet"))
    for variant in outcome.report["variants"]:
        assert variant["accuracy"]["torch"]["n"] == 60
        assert list(variant["metrics"]["torch"]) == list(TASKS[TASK].metrics)
    assert undocumented(outcome.report) == []
    check_answers(tmp_path / "run", "distill")
    assert (tmp_path / "run" / "flips.jsonl").read_text()
    tuned = [Checkpoint(next((tmp_path / "run").glob(f"stages/{stage}-*"))).config for stage in ("finetune", "distill")]
    chosen = [getattr(config, THRESHOLD_KEY) for config in tuned]
    assert chosen[0] != chosen[1]  # a student chooses its own
    assert 0.0 not in chosen


def check_answers(folder: Path, variant: str) -> list[Window]:
    """Checks the predictions of a variant and the flips of its answers; returns the evaluation rows."""
    rows = [row for row in evaluation_split(folder).rows if isinstance(row, Window)]  # read again, as load tests do
    logits, labels = load_predictions(next(folder.glob(f"stages/evaluate-{variant}-*/torch.safetensors")), "question-answering")
    assert (logits.shape, labels.array.dtype, labels.array.ndim) == ((len(rows), spans.Part.WORDS.stop), np.int32, 4)
    first = load_logits(next(folder.glob("stages/evaluate-finetune-*/torch.safetensors")))
    lines = [json.loads(line) for line in (folder / "flips.jsonl").read_text().splitlines()]
    flips = {(one["row"], one["before"], one["after"]) for one in lines if one["variant"] == variant and one["from"] == "baseline torch"}
    texts = [answers_of(rows, values, labels) for values in (first, logits)]
    assert flips == {(row, texts[0][row], texts[1][row]) for row in texts[0] if texts[0][row] != texts[1][row]}
    return rows


def answers_of(rows: list[Window], answers: np.ndarray, labels: spans.Spans) -> dict[int, str]:
    """The text of the answer to each question, by its first window."""
    found: dict[int, str] = {}
    for number in range(labels.count()):
        own = np.flatnonzero(labels.numbers == number)
        best = max(own, key=lambda row: answers[row, 0])
        none = min(answers[own, 1]) > answers[best, 0]
        start, end = answers[best, 2:4].astype(int)
        found[int(own[0])] = "" if none else rows[best].context[start:end]
    return found


@pytest.mark.slow
def test_a_served_model_answers_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [FINETUNE, {"quantize": {"mode": "ptq", "calibration": {"rows": 64}}}, {"export": {}}, {"triton_repo": {}}]
    run(recipe(tmp_path, stages, engine="openvino"), tmp_path / "run", progress=ConsoleProgress("quiet"))
    told = json.loads(next((tmp_path / "run").glob("stages/triton_repo-*/triton.json")).read_text())
    assert [model["disagreements"] for model in told["models"]] == [0] * len(told["models"])
    assert verify(tmp_path / "run", live=True, log=lambda line: None) == []
    with serve(tmp_path / "run") as server:
        ask("docs/tutorials/question-answering.md", server, tmp_path)


def test_a_head_that_is_kept_always_answers_where_the_data_do(tmp_path: Path) -> None:
    given = recipe(tmp_path, [{"quantize": {"calibration": {"rows": 64}}}], head="keep", unanswerable=0)
    outcome = run(given, tmp_path / "run", progress=ConsoleProgress("silent"))
    assert [variant["id"] for variant in outcome.report["variants"]] == ["baseline", "quantize"]
    assert list(outcome.report["variants"][0]["metrics"]["torch"]) == ["answer_f1", "answer_exact_match"]
    answers, labels = load_predictions(next((tmp_path / "run").glob("stages/evaluate-baseline-*/torch.safetensors")), "question-answering")
    assert not any(question.none for question in labels.questions(answers))


@pytest.mark.slow
def test_a_smaller_stride_is_another_run(tmp_path: Path) -> None:
    stages = [{"finetune": {"epochs": 0.1}}]
    for stride in (12, 6):
        run(recipe(tmp_path, stages, stride=stride), tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(list((tmp_path / "run").glob("stages/finetune-*"))) == 2


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"distill": {"student": {"layers": 1}, "loss": "mixkd"}}, "mixkd needs one prediction per row, question-answering has many"),
        ({"distill": {"student": {"layers": 1}, "loss": "logit_standardization"}}, "logit_standardization needs one prediction per row"),
        ({"distill": {"student": {"layers": 1}, "augment": {}}}, "augment: given; question-answering does not support it"),
        ({"prune": {"granularity": ["vocabulary"], "sparsity": 0}}, "vocabulary given; labels belong to tokens of the incoming model"),
    ],
)
def test_what_a_stage_cannot_do_is_refused_in_one_line(stage: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line) as caught:
        run(recipe(tmp_path, [{"finetune": {"epochs": 0.5}}, stage]), tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(caught.value.lines) == 1


def test_a_repository_for_gpus_is_refused(tmp_path: Path) -> None:
    context = sentiment.context(tmp_path, {"baseline": questions.checkpoint()}, Target(engines=("onnxruntime", "tensorrt")))
    with pytest.raises(InputError, match=f"answers with labels, {TASK} with spans: serve it on the cpu"):
        TritonRepo().check(None, None, replace(context, task=TASK))


def test_a_threshold_stays_where_data_have_questions_without_an_answer() -> None:
    config = Checkpoint(questions.checkpoint()).config
    for labels, before, after in (
        (("start", "end"), 1.5, None),
        (("start", "end", spans.NO_ANSWER), 1.5, 1.5),
        (("start", "end", spans.NO_ANSWER), None, 0.0),
    ):
        setattr(config, THRESHOLD_KEY, before)
        set_labels(config, TASK, labels)
        assert getattr(config, THRESHOLD_KEY) == after


def test_a_threshold_that_is_no_number_is_refused(tmp_path: Path) -> None:

    source = questions.checkpoint()
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for value in ("1", True):
        config = json.loads((source / "config.json").read_text()) | {THRESHOLD_KEY: value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=r"null_threshold: .* given; a number is allowed"):
            Checkpoint(tmp_path).preprocessor(TASK, questions.LENGTH, Target())


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    read_back = read(write_template(TASK, tmp_path / "recipe.yaml"))
    assert (read_back.model.task, read_back.data.columns.question, read_back.data.columns.label) == (TASK, "question", "answers")
    assert [stage.NAME for stage in read_back.stages] == ["finetune", "quantize", "export", "triton_repo"]
    assert (read_back.data.max_length, read_back.data.stride) == (384, 128)
