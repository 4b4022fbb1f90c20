"""Whole runs of the task reranking, on a tiny model and made-up queries with candidates: the stages, the report, the flips, the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.api import serve
from compress.commands.init import write_template
from compress.pipeline import run
from compress.recipe import check, read
from foundation.core.progress import ConsoleProgress
from foundation.labels import candidates
from foundation.measure.answers import load_predictions
from tests import tiny_collection, without_clocks
from tests.docs.clients import ask
from tests.export import sentiment
from tests.report_keys import undocumented

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]


def recipe(folder: Path, stages: list[Any], train: int = 0) -> Any:
    data = {"path": str(tiny_collection.folder(folder / "data", train)), "max_length": sentiment.LENGTH}
    model = {"path": str(tiny_collection.cross_encoder(folder / "source", layers=2)), "task": "reranking"}
    target = {"engines": ["onnxruntime"], "batch_sizes": [1, 16], "sequence_lengths": [8], "threads": 1}
    return check({"name": "tiny", "model": model, "data": data, "target": target, "stages": stages})


@pytest.mark.slow
def test_a_run_from_training_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tritonclient import grpc

    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [
        {"finetune": {"epochs": 1, "loss": "lambdarank", "batch_size": 16, "micro_batch_size": 8}},
        {"distill": {"student": {"layers": 1}, "loss": "soft_target", "epochs": 0.5}},
        {"prune": {"sparsity": 0.3, "rows": 64, "multiple_of": 8, "recover": {"epochs": 0.5}}},
        {"quantize": {"mode": "qat", "calibration": {"rows": 64}, "qat": {"epochs": 0.2, "loss": "margin_mse"}}},
        {"export": {}},
        {"triton_repo": {}},
    ]
    outcome = run(recipe(tmp_path, stages, train=60), tmp_path / "run", progress=ConsoleProgress("quiet"))
    report = outcome.report
    assert report["metric"] == {"name": "ndcg@10", "higher_is_better": True, "chance": report["metric"]["chance"]}
    last = report["variants"][-1]
    assert {cell["n"] for cell in last["accuracy"].values()} == {40}  # queries
    assert last["metrics"]["triton"] == last["metrics"]["onnxruntime"]
    assert undocumented(report) == []
    path = next((tmp_path / "run").glob("stages/triton_repo-*/quantize-int8.safetensors"))
    answers, labels = load_predictions(path, "reranking")
    assert (answers.shape, labels.array.shape) == ((320, 1), (320, candidates.WIDTH))
    lines = (tmp_path / "data" / "candidates" / "test.tsv").read_text().splitlines()[1:9]
    texts = {}
    for name in ("queries", "corpus"):
        for line in (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines():
            texts[json.loads(line)["_id"]] = json.loads(line)["text"]
    rows = [[texts[name] for name in line.split("\t")[:2]] for line in lines]  # all candidates of the first query, the best first
    with serve(tmp_path / "run") as server:
        client, given = grpc.InferenceServerClient(server.grpc_address), []
        for place, name in enumerate(("TEXT", "TEXT_PAIR")):
            given.append(grpc.InferInput(name, [len(rows), 1], "BYTES"))
            given[-1].set_data_from_numpy(np.array([[row[place]] for row in rows], dtype=object))
        scores = client.infer("quantize-int8", given).as_numpy("SCORE")
        ask("docs/tutorials/reranking.md", server, tmp_path)
    np.testing.assert_allclose(scores.reshape(-1), answers[: len(rows), 0], atol=1e-5)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("reranked")
    stages = [{"distill": {"student": {"layers": 1}, "loss": "margin_mse", "epochs": 0.5}}, {"quantize": {"calibration": {"rows": 64}}}]
    return run(recipe(folder, stages), folder / "run", progress=ConsoleProgress("quiet"))


def predicted(folder: Path, variant: str) -> tuple[np.ndarray, np.ndarray]:
    return load_predictions(next(folder.glob(f"stages/evaluate-{variant}-*/torch.safetensors")), "reranking")


def test_the_report_has_the_figures_of_the_order(quantized: Any) -> None:
    (before, labels), (after, _) = (predicted(quantized.folder, name) for name in ("baseline", "quantize"))
    last = quantized.report["variants"][-1]
    means = [labels.values(one)[0][:, 0].mean() for one in (before, after)]
    assert last["accuracy"]["torch"]["value"] == pytest.approx(means[1])
    assert last["drops"]["torch"]["difference"] == pytest.approx(means[0] - means[1])
    assert list(last["metrics"]["torch"]) == ["ndcg@10", "mrr@10"]
    history = json.loads(next(quantized.folder.glob("stages/distill-*/manifest.json")).read_text())["metrics"]
    assert history["selection"]["metric"] == "ndcg@10 against the teacher"


def test_flips_are_queries_with_another_first_candidate(quantized: Any) -> None:
    (before, labels), (after, _) = (predicted(quantized.folder, name) for name in ("baseline", "quantize"))
    lines = [json.loads(line) for line in (quantized.folder / "flips.jsonl").read_text().splitlines()]
    found = {line["row"]: line for line in lines if line["variant"] == "quantize"}
    changed = {}
    for start in range(0, len(labels), 8):
        one, other = (start + int(np.argmax(scores[start : start + 8, 0])) for scores in (before, after))
        if one != other:
            changed[start] = int(labels.array[one, 2]), int(labels.array[other, 2])
    assert changed
    assert {row: (line["grade_before"], line["grade_after"]) for row, line in found.items()} == changed
    assert all(line["before"] != line["after"] for line in found.values())


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    read_back = read(write_template("reranking", tmp_path / "recipe.yaml"))
    assert (read_back.model.task, read_back.data.candidates) == ("reranking", 50)
