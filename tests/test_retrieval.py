"""Whole runs of the task retrieval, on a tiny model and made-up queries and documents: the stages, the report, the flips, the server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from compress.api import serve, verify
from compress.commands.init import write_template
from compress.pipeline import run
from compress.recipe import check, read
from compress.report import stored_vectors
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.labels import relevance
from foundation.measure.answers import load_logits, load_predictions
from tests import tiny_collection, tiny_embedding, without_clocks
from tests.docs.clients import ask
from tests.export import sentiment
from tests.problems import raises_problem
from tests.report_keys import undocumented

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

TARGET = {"engines": ["onnxruntime"], "batch_sizes": [1], "sequence_lengths": [8], "threads": 1}
METRICS = ["ndcg@10", "mrr@10", "recall@100"]


def recipe(folder: Path, stages: list[Any], layers: int = 1, train: int = 0) -> Any:
    data = {"path": str(tiny_collection.folder(folder / "data", train)), "max_length": sentiment.LENGTH}
    model = {"path": str(tiny_embedding.folder(folder / "source", layers)), "task": "retrieval"}
    return check({"name": "tiny", "model": model, "data": data, "target": TARGET, "stages": stages})


def predicted(folder: Path, variant: str) -> tuple[np.ndarray, np.ndarray]:
    return load_predictions(next(folder.glob(f"stages/evaluate-{variant}-*/torch.safetensors")), "retrieval")


@pytest.mark.slow
def test_a_run_from_training_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [
        {"finetune": {"epochs": 1}},
        {"distill": {"student": {"layers": 1}, "loss": "soft_target", "epochs": 0.5}},
        {"prune": {"sparsity": 0.3, "rows": 64, "multiple_of": 8, "recover": {"epochs": 0.5}}},
        {"quantize": {"calibration": {"rows": 64}}},
        {"export": {}},
        {"triton_repo": {}},
    ]
    outcome = run(recipe(tmp_path, stages, layers=2, train=60), tmp_path / "run", progress=ConsoleProgress("quiet"))
    report = outcome.report
    assert report["metric"] == {"name": "ndcg@10", "higher_is_better": True, "chance": report["metric"]["chance"]}
    for variant in report["variants"]:
        assert variant["accuracy"]["torch"]["n"] == 40  # queries
        assert list(variant["metrics"]["torch"]) == METRICS
    last = report["variants"][-1]
    assert last["accuracy"]["onnxruntime"]["n"] == last["accuracy"]["triton"]["n"] == 40
    assert last["metrics"]["triton"] == last["metrics"]["onnxruntime"]
    assert last["drops"]["triton"]["n"] == 40
    assert undocumented(report) == []
    served, labels = load_predictions(next((tmp_path / "run").glob("stages/triton_repo-*/quantize-int8.safetensors")), "retrieval")
    engine = load_logits(next((tmp_path / "run").glob("stages/export-*/**/onnxruntime-dynamic.safetensors")))
    assert served.shape == (160, tiny_embedding.WIDTH)
    assert isinstance(labels, relevance.Judged)
    assert load_file(tmp_path / "run" / "golden.safetensors")["logits.quantize.onnxruntime"].shape == (64, tiny_embedding.WIDTH)
    assert engine.shape == served.shape
    verify(tmp_path / "run")
    with serve(tmp_path / "run") as server:
        ask("docs/tutorials/retrieval.md", server, tmp_path)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("quantized")
    stages = [
        {"distill": {"student": {"layers": 1}, "loss": "similarity", "epochs": 1, "keep": "best"}},
        {"quantize": {"calibration": {"rows": 64}}},
    ]
    return run(recipe(folder, stages, layers=2), folder / "run", progress=ConsoleProgress("quiet"))


def test_the_report_compares_what_is_found(quantized: Any) -> None:
    baseline, student, last = quantized.report["variants"]
    (before, labels), (after, _) = (predicted(quantized.folder, name) for name in ("baseline", "quantize"))
    assert last["vectors"]["torch"]["top10_overlap"] == pytest.approx(labels.overlap(before, after))
    assert last["vectors"]["torch"]["top10_overlap"] < 1
    assert baseline["vectors"]["torch"]["top10_overlap"] == 1
    drop = last["drops"]["torch"]
    rows = [labels.values(one)[0][:, 0] for one in (before, after)]
    assert drop["difference"] == pytest.approx(float(rows[0].mean() - rows[1].mean()))
    assert drop["low"] <= drop["difference"] <= drop["high"]
    for form, size in (("int8", tiny_embedding.WIDTH), ("binary", tiny_embedding.WIDTH // 8)):
        cell, scale = last["vectors"]["torch"]["stored"][form], stored_vectors.scale_of(after, labels)
        coded = stored_vectors.codes(after, form, scale)  # type: ignore[arg-type]
        assert cell["value"] == pytest.approx(float(labels.values(coded)[0][:, 0].mean()))
        assert cell["difference"] == pytest.approx(float(rows[0].mean()) - cell["value"])
        assert cell["bytes"] == size
        assert cell["scale"] == (scale if form == "int8" else None)
    assert "Vectors in an index" in (quantized.folder / "report.html").read_text()
    assert "interval on n queries" in re.sub(r"<[^>]+>", "", (quantized.folder / "report.html").read_text())
    assert student["metrics"]["torch"].keys() == set(METRICS)


def test_the_best_student_is_the_one_that_finds_what_the_teacher_finds(quantized: Any) -> None:
    history = json.loads(next(quantized.folder.glob("stages/distill-*/manifest.json")).read_text())["metrics"]
    assert history["selection"]["metric"] == "ndcg@10 against the teacher"
    assert all(0 < value["value"] <= 1 for value in history["selection"]["values"])


def test_flips_are_queries_that_find_another_document_first(quantized: Any) -> None:
    (before, labels), (after, _) = (predicted(quantized.folder, name) for name in ("baseline", "quantize"))
    lines = [json.loads(line) for line in (quantized.folder / "flips.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["variant"] == "quantize"]
    known, ours, theirs = labels.known, labels.nearest(before, 1), labels.nearest(after, 1)
    changed = known.queries[ours[:, 0] != theirs[:, 0]].tolist()
    assert changed
    assert {line["row"] for line in lines} == set(changed)
    texts = [json.loads(line)["text"] for line in (quantized.folder.parent / "data" / "queries.jsonl").read_text().splitlines()]
    corpus = [json.loads(line)["text"] for line in (quantized.folder.parent / "data" / "corpus.jsonl").read_text().splitlines()]
    for line in lines:
        place = known.queries.tolist().index(line["row"])
        assert line["input"] in texts
        for word, found in (("before", ours), ("after", theirs)):
            assert line[word] == corpus[found[place, 0]]
            assert line[f"grade_{word}"] == known.grades[place].get(int(found[place, 0]), 0)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"finetune": {}}, r"stages\.finetune: learns from queries, and the data have none to train on; add qrels/train\.tsv"),
        ({"prune": {"recover": {"distill": False}}}, r"stages\.prune\.recover: learns from queries"),
        ({"quantize": {"mode": "qat", "qat": {"distill": False}}}, r"stages\.quantize\.qat: learns from queries"),
    ],
)
def test_what_needs_queries_is_refused_without_them(stage: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line) as caught:
        run(recipe(tmp_path, [stage]), tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        ({"prune": {"recover": {"micro_batch_size": 8}}}, "prune.recover"),
        ({"quantize": {"mode": "qat", "qat": {"distill": False, "micro_batch_size": 8}}}, "quantize.qat"),
    ],
)
def test_micro_batches_of_queries_are_refused_where_they_would_part_them(stage: dict[str, Any], key: str, tmp_path: Path) -> None:
    with raises_problem(f"stages.{key}.micro_batch_size", "8", "ranking", "leave it out"):
        run(recipe(tmp_path, [stage], train=30), tmp_path / "run", progress=ConsoleProgress("silent"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [{"finetune": {"micro_batch_size": 8}}, {"distill": {"student": {"layers": 1}, "micro_batch_size": 8}}])
def test_queries_of_several_micro_batches_are_compared(stage: dict[str, Any], tmp_path: Path) -> None:
    outcome = run(recipe(tmp_path, [stage], train=30), tmp_path / "run", progress=ConsoleProgress("silent"))
    assert outcome.report["variants"][-1]["id"] == next(iter(stage))


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    read_back = read(write_template("retrieval", tmp_path / "recipe.yaml"))
    assert read_back.model.task == "retrieval"
    assert [stage.NAME for stage in read_back.stages] == ["quantize", "export", "triton_repo"]
