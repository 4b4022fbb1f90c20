"""Whole runs of the task sentence-embedding, on a tiny model and made-up pairs: every stage, the report, the flips, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModel

from compress.api import serve
from compress.commands.init import write_template
from compress.pipeline import run
from compress.recipe import check, read
from distill.distill import Distill
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.labels import vectors
from foundation.measure.answers import load_predictions
from foundation.models.folder import Checkpoint
from foundation.training.finetune import Finetune
from tests import tiny_embedding, without_clocks
from tests.docs.clients import ask
from tests.export import sentiment
from tests.problems import raises_problem
from tests.report_keys import undocumented

pytestmark = pytest.mark.usefixtures("engines_inside")

TARGET = {"engines": ["onnxruntime"], "batch_sizes": [1], "sequence_lengths": [8], "threads": 1}


def recipe(folder: Path, stages: list[Any], layers: int = 1, **more: Any) -> Any:
    model, data = tiny_embedding.folder(folder / "source", layers), tiny_embedding.pairs(folder / "data")
    return check({**tiny_embedding.recipe("tiny", model, data), "target": TARGET, "stages": stages, **more})


@pytest.mark.slow
def test_a_run_from_training_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [
        {"finetune": {"epochs": 0.5, "loss": "ranking"}},
        {"distill": {"student": {"layers": 1}, "loss": "similarity", "epochs": 0.5}},
        {"prune": {"sparsity": 0.3, "rows": 64, "multiple_of": 8, "recover": {"epochs": 0.5}}},
        {"quantize": {"calibration": {"rows": 64}}},
        {"export": {}},
        {"triton_repo": {"serve": False}},
    ]
    outcome = run(recipe(tmp_path, stages, layers=2), tmp_path / "run", progress=ConsoleProgress("quiet"))
    report = outcome.report
    assert report["metric"] == {"name": "spearman", "higher_is_better": True, "chance": report["metric"]["chance"]}
    assert [variant["id"] for variant in report["variants"]] == ["finetune", "distill", "prune", "quantize"]
    for variant in report["variants"]:
        assert variant["accuracy"]["torch"]["n"] == 40  # pairs
        assert list(variant["metrics"]["torch"]) == ["spearman", "pearson"]
    last = report["variants"][-1]
    assert last["accuracy"]["onnxruntime"]["n"] == 40
    assert last["vectors"]["onnxruntime"].keys() == {"cosine", "lowest_cosine", "top10_overlap", "n", "stored"}
    first = report["variants"][0]["vectors"]["torch"]
    assert {key: value for key, value in first.items() if key != "stored"} == {
        "cosine": pytest.approx(1),
        "lowest_cosine": pytest.approx(1),
        "top10_overlap": 1,
        "n": 80,
    }
    assert undocumented(report) == []
    with serve(tmp_path / "run") as server:
        ask("docs/tutorials/sentence-embedding.md", server, tmp_path)
    logits, labels = load_predictions(next((tmp_path / "run").glob("stages/evaluate-quantize-*/torch.safetensors")), "sentence-embedding")
    assert (logits.shape, labels.array.shape) == ((80, tiny_embedding.WIDTH), (80, 2))
    np.testing.assert_allclose(np.linalg.norm(logits, axis=1), 1, atol=1e-5)
    config = next((tmp_path / "run").glob("stages/triton_repo-*/model_repository/quantize-int8/config.pbtxt")).read_text()
    assert 'name: "VECTOR"' in config
    assert f"dims: {tiny_embedding.WIDTH}" in config
    assert "LABEL" not in config
    assert load_file(tmp_path / "run" / "golden.safetensors")["logits.quantize.onnxruntime"].shape == (64, tiny_embedding.WIDTH)
    distilled = next((tmp_path / "run").glob("stages/distill-*"))
    assert AutoModel.from_pretrained(distilled).config.num_hidden_layers == 1
    assert (distilled / "1_Pooling" / "config.json").exists()


@pytest.mark.whole
def test_flips_are_texts_with_another_neighbour(tmp_path: Path) -> None:
    outcome = run(recipe(tmp_path, [{"quantize": {"calibration": {"rows": 64}}}]), tmp_path / "run", progress=ConsoleProgress("quiet"))
    (before, labels), (after, _) = (
        load_predictions(next(outcome.folder.glob(f"stages/evaluate-{name}-*/torch.safetensors")), "sentence-embedding")
        for name in ("baseline", "quantize")
    )
    lines = [json.loads(line) for line in (outcome.folder / "flips.jsonl").read_text().splitlines()]
    changed = np.flatnonzero(vectors.neighbours(before)[:, 0] != vectors.neighbours(after)[:, 0])
    assert {line["row"] for line in lines} <= set(changed.tolist())  # a text that occurs again has no flip
    assert lines
    for line in lines:
        assert {type(line[key]) for key in ("before", "after", "input")} == {str}
        assert line["before"] != line["after"]
        assert line["label"] is None
    assert labels.count() == 40


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"finetune": {"label_smoothing": 0.1}}, "stages.finetune.label_smoothing: 0.1 given; sentence-embedding has no classes"),
        ({"distill": {"student": {"layers": 1}, "loss": "mixkd"}}, "stages.distill.loss: mixkd given; mixkd compares logits of classes"),
        (
            {"distill": {"student": {"layers": 1}, "fraction": 0.5}},
            "stages.distill.fraction: given; the rows of sentence-embedding are texts",
        ),
        (
            {"distill": {"student": {"layers": 1}, "losses": [{"name": "similarity"}, {"name": "hidden"}], "micro_batch_size": 8}},
            r"stages.distill.losses\[0\]: similarity compares the rows of a batch; remove micro_batch_size \(8 given\)",
        ),
        ({"distill": {"student": {"layers": 1}, "loss": "relational", "micro_batch_size": 8}}, "relational compares the rows of a batch"),
        (
            {"quantize": {"mode": "qat", "qat": {"loss": "similarity", "micro_batch_size": 8}}},
            "stages.quantize.qat.loss: similarity compares the rows of a batch; remove micro_batch_size",
        ),
    ],
)
def test_what_a_stage_cannot_do_is_refused_in_one_line(stage: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line) as caught:
        run(recipe(tmp_path, [stage]), tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(caught.value.lines) == 1


def test_a_repository_for_gpus_is_refused(tmp_path: Path) -> None:
    given = recipe(tmp_path, [{"export": {}}, {"triton_repo": {}}], target={**TARGET, "engines": ["onnxruntime", "tensorrt"]})
    with raises_problem("target.engines", "tensorrt", "repository for GPUs answers with labels"):
        run(given, tmp_path / "run", progress=ConsoleProgress("silent"))


def test_losses_for_vectors_are_refused_for_classes(tmp_path: Path) -> None:
    context = sentiment.context(tmp_path, {"baseline": sentiment.checkpoint()})
    config = Checkpoint(sentiment.checkpoint()).config
    with raises_problem("finetune.loss", "ranking", "retrieval or sentence-triplets", "leave it out"):
        Finetune(loss="ranking").check(config, None, context)
    with pytest.raises(
        InputError,
        match=r"similarity .* text-classification; .*, retrieval or sentence-triplets: give",
    ):
        Distill(student={"layers": 1}, loss="similarity").check(config, config, context)  # type: ignore[arg-type]


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    read_back = read(write_template("sentence-embedding", tmp_path / "recipe.yaml"))
    assert read_back.model.task == "sentence-embedding"
    assert [stage.NAME for stage in read_back.stages] == ["quantize", "export", "triton_repo"]


def of_triplets(folder: Path, stages: list[Any], layers: int = 1, **columns: str) -> Any:
    """Returns a recipe that trains on pairs or triplets without scores and is judged by pairs with scores."""
    data = tiny_embedding.triplets(folder / "data", train=120, validation=1, test=1)
    scored = {"columns": {"text": "first", "text_pair": "second", "label": "score"}}
    tiny_embedding.pairs(folder / "scored", train=60)
    files = {
        "train": {"file": "data/train.jsonl", "columns": {"text": "anchor", "text_pair": "positive", **columns}},
        "validation": {"file": "scored/train.csv", **scored},
        "test": {"file": "scored/test.csv", **scored},
    }
    raw = tiny_embedding.recipe("tiny", tiny_embedding.folder(folder / "source", layers), data)
    raw["data"] = {"path": str(folder), "files": files, "max_length": sentiment.LENGTH}
    return check({**raw, "target": TARGET, "stages": stages})


def losses_of(folder: Path, stage: str) -> list[dict[str, float]]:
    """Returns the losses of each epoch of a stage."""
    losses: list[dict[str, float]] = json.loads(next(folder.glob(f"stages/{stage}-*/manifest.json")).read_text())["metrics"]["losses"]
    return losses


@pytest.mark.slow
@pytest.mark.whole
def test_triplets_are_trained_on_and_pairs_with_scores_judge(tmp_path: Path) -> None:
    stages = [
        {"finetune": {"epochs": 3, "learning_rate": 1e-3, "keep": "last", "batch_size": 32, "micro_batch_size": 16, "loss": "triplet"}},
        {"quantize": {"calibration": {"rows": 64}}},
    ]
    outcome = run(of_triplets(tmp_path, stages, negative="negative"), tmp_path / "run", progress=ConsoleProgress("silent"))
    losses = [epoch["triplet"] for epoch in losses_of(outcome.folder, "finetune")]
    assert losses[0] > losses[-1]
    manifest = json.loads(next(outcome.folder.glob("stages/finetune-*/manifest.json")).read_text())["metrics"]
    assert manifest["steps"] == 3 * 12  # 120 triplets, 10 in a batch
    assert manifest["selection"]["metric"] == "spearman"
    assert [variant["accuracy"]["torch"]["n"] for variant in outcome.report["variants"]] == [40, 40]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [{}, {"negative": "negative"}])
def test_every_stage_learns_from_rows_without_scores(columns: dict[str, str], tmp_path: Path) -> None:
    stages = [
        {"finetune": {"epochs": 2, "learning_rate": 1e-3, "keep": "last"}},
        {"distill": {"student": {"layers": 1}, "epochs": 0.5, "hard_weight": 0.5}},
        {"prune": {"sparsity": 0.3, "rows": 64, "multiple_of": 8, "recover": {"epochs": 0.5, "soft_weight": 0.5}}},
        {"quantize": {"mode": "qat", "qat": {"epochs": 0.5, "distill": False}, "calibration": {"rows": 64}}},
    ]
    outcome = run(of_triplets(tmp_path, stages, layers=2, **columns), tmp_path / "run", progress=ConsoleProgress("silent"))
    first, last = (epoch["ranking"] for epoch in losses_of(outcome.folder, "finetune"))
    assert first > last
    assert [variant["id"] for variant in outcome.report["variants"]] == ["finetune", "distill", "prune", "quantize"]
    assert all(variant["accuracy"]["torch"]["n"] == 40 for variant in outcome.report["variants"])


@pytest.mark.slow
@pytest.mark.whole
def test_triplets_judge_a_task_of_their_own(tmp_path: Path) -> None:
    stages = [{"finetune": {"epochs": 3, "learning_rate": 1e-3, "keep": "last"}}, {"quantize": {"calibration": {"rows": 64}}}]
    raw = tiny_embedding.recipe("tiny", tiny_embedding.folder(tmp_path / "source"), tiny_embedding.triplets(tmp_path / "data", train=120))
    raw["model"]["task"] = "sentence-triplets"
    raw["data"]["columns"] = {"text": "anchor", "text_pair": "positive"}
    outcome = run(check({**raw, "target": TARGET, "stages": stages}), tmp_path / "run", progress=ConsoleProgress("silent"))
    report = outcome.report
    assert report["metric"] == {"name": "accuracy", "higher_is_better": True, "chance": report["metric"]["chance"]}
    assert [variant["accuracy"]["torch"]["n"] for variant in report["variants"]] == [40, 40]
    answers, labels = load_predictions(next(outcome.folder.glob("stages/evaluate-finetune-*/torch.safetensors")), "sentence-embedding")
    right = 0
    for row in range(0, 120, 3):
        anchor, positive, negative = (answers[place].astype(float) / np.linalg.norm(answers[place]) for place in range(row, row + 3))
        right += anchor @ positive > anchor @ negative
    assert labels.array.shape == (120, 4)
    assert report["variants"][0]["metrics"]["torch"]["accuracy"] == pytest.approx(right / 40)
    assert undocumented(report) == []


@pytest.mark.slow
@pytest.mark.whole
def test_margins_of_several_negatives_are_trained_on(tmp_path: Path) -> None:
    data = tiny_embedding.triplets(tmp_path / "data")
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):  # one to three negatives
        row["negative"] = [row["negative"], *(f"not {'not ' * step}{row['anchor']}" for step in range(number % 3))]
        row["margin"] = [0.5] * len(row["negative"])
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = tiny_embedding.recipe("tiny", tiny_embedding.folder(tmp_path / "source"), data)
    raw["model"]["task"] = "sentence-triplets"
    raw["data"]["columns"] = {"text": "anchor", "text_pair": "positive", "margin": "margin"}
    stages = [
        {"finetune": {"epochs": 2, "learning_rate": 1e-3, "keep": "last", "batch_size": 40, "micro_batch_size": 20}},
        {"distill": {"student": {"layers": 1}, "loss": "margin_mse", "epochs": 0.5}},
    ]
    outcome = run(check({**raw, "target": TARGET, "stages": stages}), tmp_path / "run", progress=ConsoleProgress("silent"))
    losses = [epoch["margin_mse"] for epoch in losses_of(outcome.folder, "finetune")]
    assert losses[1] < losses[0]
    manifest = json.loads(next(outcome.folder.glob("stages/finetune-*/manifest.json")).read_text())["metrics"]
    assert manifest["steps"] == 2 * 38  # 300 rows of five texts, 8 in a batch
    assert losses_of(outcome.folder, "distill")[0]["margin_mse"] < 1e-3  # of the same layers
    assert [variant["accuracy"]["torch"]["n"] for variant in outcome.report["variants"]] == [40, 40]


@pytest.mark.parametrize(
    ("columns", "stage", "line"),
    [
        (
            {},
            {"finetune": {"loss": "cosine"}},
            "finetune.loss: cosine given; it learns scores, and the train rows have none: give ranking or",
        ),
        (
            {"negative": "negative"},
            {"quantize": {"mode": "qat", "qat": {"distill": False, "micro_batch_size": 9}}},
            "quantize.qat.micro_batch_size: 9 given; ranking compares the rows of a batch: leave it out",
        ),
        (
            {},
            {"distill": {"student": {"layers": 1}, "losses": [{"name": "hidden"}], "hard_weight": 1, "micro_batch_size": 8}},
            "distill.micro_batch_size: 8 given; ranking compares the rows of a batch: leave it out",
        ),
        (
            {"negative": "negative"},
            {"finetune": {"loss": "margin_mse"}},
            "finetune.loss: margin_mse given; it learns margins .*, and the train rows have none: set data.columns.margin, or distill",
        ),
        (
            {},
            {"distill": {"student": {"layers": 1}, "loss": "margin_mse"}},
            "distill.loss: margin_mse given; the train rows have no neg",
        ),
        ({"negative": "negative"}, {"finetune": {"batch_size": 2}}, "finetune.batch_size: 2 given; the 3 texts of a triplet .* at least 3"),
    ],
)
def test_losses_that_do_not_fit_the_rows_are_refused_in_one_line(
    columns: dict[str, str], stage: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=line) as caught:
        run(of_triplets(tmp_path, [stage], **columns), tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(caught.value.lines) == 1


def test_margins_that_vectors_of_length_1_cannot_have_are_refused(tmp_path: Path) -> None:
    given = of_triplets(tmp_path, [{"finetune": {}}], negative="negative", margin="margin")
    file = tmp_path / "data" / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "margin": -7.5 if number == 3 else 1}) + "\n" for number, row in enumerate(rows)))
    line = r"stages\.finetune\.loss: margin_mse given; data\.columns\.margin reaches 7\.5, and vectors of length 1, .* of at most 2: divide"
    with pytest.raises(InputError, match=line) as caught:
        run(given, tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(caught.value.lines) == 1


@pytest.mark.slow
@pytest.mark.whole
def test_training_brings_the_cosines_closer_to_the_scores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stages = [{"finetune": {"epochs": 6, "learning_rate": 1e-3, "keep": "last"}}]
    outcome = run(recipe(tmp_path, stages), tmp_path / "run", progress=ConsoleProgress("silent"))
    history = json.loads(next(outcome.folder.glob("stages/finetune-*/manifest.json")).read_text())["metrics"]
    losses = [epoch["loss"] for epoch in history["losses"]]
    assert losses[-1] < 0.5 * losses[0]
    assert history["selection"]["metric"] == "spearman"
