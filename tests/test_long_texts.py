"""Classifiers that read long texts in windows: against windows written out, in every place that reads rows, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.api import serve
from compress.commands.verify import verify
from compress.pipeline import run
from compress.reading.load import load_data
from compress.recipe import check
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.config import DataConfig, Windows
from foundation.measure.predictions import compared, logits_of, predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.windows import merged
from tests import without_clocks
from tests.export import sentiment
from tests.problems import raises_problem
from tests.report_keys import undocumented

TASK = "text-classification"
LENGTH, STRIDE = 12, 3
WORDS = [word for word in sentiment.WORDS if word not in ("it",)]
LONG = st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join)


def prepared(aggregate: str = "mean", stride: int = STRIDE) -> Preprocessor:
    return Checkpoint(sentiment.checkpoint()).preprocessor(TASK, LENGTH, Target(sequence_lengths=(8,)), stride, aggregate)


def naive_windows(text: str, stride: int) -> list[list[int]]:
    """Returns the ids of each window: as many tokens as fit between [CLS] and [SEP], each `stride` tokens back, to the last token."""
    whole = Checkpoint(sentiment.checkpoint()).preprocessor(TASK, LENGTH, Target(sequence_lengths=(8,)))
    assert whole.tokenizer is not None
    whole.tokenizer.no_truncation()
    first, *ids, last = whole.tokenizer.encode(text).ids
    room, start, found = LENGTH - 2, 0, []
    while True:
        found.append([first, *ids[start : start + room], last])
        if start + room >= len(ids):
            return found
        start += room - stride


@given(texts=st.lists(LONG, min_size=1, max_size=4), stride=st.integers(0, LENGTH - 3))
def test_windows_are_those_written_out(texts: list[str], stride: int) -> None:
    made = prepared(stride=stride)
    owners, tokens = made.divided(texts)
    expected = [(number, window) for number, text in enumerate(texts) for window in naive_windows(text, stride)]
    assert [(owner, row[0].tolist()) for owner, row in zip(owners, tokens, strict=True)] == expected
    assert [row[0].tolist() for row in made.tokenized(texts)] == [naive_windows(text, stride)[0] for text in texts]
    batches = [(indices, len(features["input_ids"])) for indices, features in made.batches(texts, 3)]
    assert sorted(owner for indices, _ in batches for owner in indices) == [owner for owner, _ in expected]
    assert all(len(indices) == count <= 3 for indices, count in batches)


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=6), size=st.integers(1, 5), seed=st.integers(0, 99))
def test_logits_of_windows_become_those_of_their_texts(counts: list[int], size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    owners = random.permutation(np.repeat(np.arange(len(counts)), counts))
    values = random.normal(size=(len(owners), 3)).astype(np.float32)
    found = [(owners[start : start + size].tolist(), values[start : start + size]) for start in range(0, len(owners), size)]
    for aggregate, of in (("mean", np.mean), ("max", np.max)):
        expected = np.stack([of(values[owners == number].astype(np.float64), axis=0) for number in range(len(counts))])
        np.testing.assert_allclose(merged(found, len(counts), aggregate), expected, rtol=1e-6)


def long_texts(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 50))) for _ in range(count)]


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_an_answer_is_that_of_all_windows(aggregate: str) -> None:
    model, rows = load(sentiment.checkpoint()), long_texts(9)
    expected = []
    for text in rows:
        with torch.inference_mode():
            logits = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in naive_windows(text, STRIDE)]).double()
        expected.append((logits.mean(dim=0) if aggregate == "mean" else logits.max(dim=0).values).numpy())
    found = predict(model, prepared(aggregate), rows, 4)
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-4)
    np.testing.assert_allclose(compared(model, prepared(aggregate), rows, 4), found, atol=1e-4)
    assert [indices for indices, _ in logits_of(model, prepared(aggregate), rows, 4)] == [list(range(9))]
    assert np.abs(found - predict(model, prepared(""), rows, 4)).max() > 1e-2


@pytest.mark.usefixtures("engines_inside")
def test_an_engine_answers_with_all_windows(tmp_path: Path) -> None:
    from export.engines.spec import torch_spec
    from foundation.measure.engine_process import EngineProcess

    prepared().save(tmp_path)
    saved = Preprocessor.load(tmp_path)
    assert (saved.stride, saved.aggregate) == (STRIDE, "mean")
    rows = long_texts(7)
    with EngineProcess(torch_spec(Checkpoint(sentiment.checkpoint()), tmp_path, "fp32", Target(threads=1))) as engine:
        found = engine.predict(rows, 4)
    np.testing.assert_allclose(found, predict(load(sentiment.checkpoint()), prepared(), rows, 4), atol=1e-4)


def written(folder: Path, train: int = 60, test: int = 40) -> Path:
    """Writes texts of 1 to 49 words; the label is whether "good" stands among the words."""
    folder.mkdir(exist_ok=True)
    for seed, (split, count) in enumerate({"train": train, "test": test}.items()):
        rows = [{"text": text, "label": ("without", "with")["good" in text.split()]} for text in long_texts(count, seed)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_training_rows_are_windows_and_others_stay_whole(tmp_path: Path) -> None:
    told: list[str] = []
    config = DataConfig(path=str(written(tmp_path / "data")), max_length=LENGTH, windows=Windows(stride=STRIDE))
    whole = load_data(config.model_copy(update={"windows": None}), TASK, None, told.append, str(sentiment.checkpoint()))
    data = load_data(config, TASK, None, told.append, str(sentiment.checkpoint()))
    assert (data.evaluation.digest, data.selection.digest) == (whole.evaluation.digest, whole.selection.digest)
    expected = [
        (ids, int(label))
        for text, label in zip(whole.train.rows, whole.train.labels.array, strict=True)
        for ids in naive_windows(str(text), STRIDE)
    ]
    made = prepared("").tokenized(data.train.rows)
    assert [(row[0].tolist(), int(label)) for row, label in zip(made, data.train.labels.array, strict=True)] == expected
    assert any(f"{len(whole.train)} texts become {len(expected)} rows" in line for line in told)


@pytest.mark.parametrize(
    ("task", "changes", "line"),
    [
        ("text-regression", {}, "data.windows: given for text-regression; it is for text-classification or multi-label-classification"),
        (TASK, {"windows": Windows(stride=10)}, "data.windows.stride: 10 given; a window of data.max_length 12 has room for 10 tokens"),
        (TASK, {"columns": {"text": "text", "text_pair": "text"}}, "data.windows: given for pairs of texts; single texts are divided"),
    ],
)
def test_what_cannot_be_read_in_windows_is_refused_in_one_line(task: str, changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    base = {"path": str(written(tmp_path / "data")), "max_length": LENGTH, "windows": Windows(stride=STRIDE)}
    with pytest.raises(InputError) as caught:
        load_data(DataConfig(**{**base, **changes}), task, None, lambda line: None, str(sentiment.checkpoint()))
    assert len(caught.value.lines) == 1
    assert line in str(caught.value)


def recipe(folder: Path, **changes: Any) -> Any:
    model = {"path": str(sentiment.checkpoint()), "task": TASK, "head": "new"}
    data = {"path": str(written(folder / "data", train=200)), "max_length": LENGTH, "windows": {"stride": STRIDE, "aggregate": "max"}}
    target = {"engines": ["openvino", "onnxruntime"], "batch_sizes": [1, 4], "sequence_lengths": [8, LENGTH], "threads": 1}
    stages = [
        {"finetune": {"epochs": 2, "learning_rate": 1e-3}},
        {"quantize": {"calibration": {"rows": 64}}},
        {"export": {}},
        {"triton_repo": {}},
    ]
    return check({"name": "tiny", "model": model, "data": data, "target": target, "stages": stages, "seed": 1, **changes})


@pytest.mark.slow
def test_a_run_with_windows_is_served_as_it_was_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tritonclient.grpc import InferenceServerClient

    from triton_repo.client import infer

    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    report = run(recipe(tmp_path), tmp_path / "run", progress=ConsoleProgress("silent")).report
    assert undocumented(report) == []
    assert report["windows"]["rows"] == 40 < report["windows"]["windows"]
    assert report["windows"] | {"windows": 0} == {"rows": 40, "windows": 0, "max_length": LENGTH, "stride": STRIDE, "aggregate": "max"}
    told = json.loads(next((tmp_path / "run").glob("stages/triton_repo-*/triton.json")).read_text())
    assert [model["disagreements"] for model in told["models"]] == [0] * len(told["models"])
    assert all(model["max_abs"] < 1e-5 for model in told["models"]), told
    assert verify(tmp_path / "run", live=True, log=lambda line: None) == []
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "40 rows were read in" in page
    with serve(tmp_path / "run") as server, InferenceServerClient(server.grpc_address) as client:
        answers = [infer(client, "quantize-int8", text).as_numpy("LOGITS")[0] for text in ("good", "bad " * 30, "bad " * 30 + "good")]
    assert np.abs(answers[1] - answers[2]).max() > 1e-3  # the last word stands behind the first window


@pytest.mark.whole
def test_repositories_for_gpus_are_refused(tmp_path: Path) -> None:
    target = {"engines": ["openvino", "tensorrt"], "batch_sizes": [1], "sequence_lengths": [LENGTH], "threads": 1}
    with raises_problem("data.windows", "given", "repository for GPUs truncates", "serve on the cpu"):
        run(recipe(tmp_path, target=target), tmp_path / "run", progress=ConsoleProgress("silent"))
