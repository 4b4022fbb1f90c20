"""What `plan` says of the products of attention, against the formula; lengths up to 8,192 tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, BertConfig, ModernBertConfig

from compress.commands.plan import describe
from compress.pipeline import run
from compress.recipe import check
from export.graph.onnx import export_float
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.models import size
from foundation.models.folder import Checkpoint
from foundation.models.library import with_class
from foundation.models.size import count
from tests import without_clocks
from tests.export import sentiment

pytestmark = pytest.mark.whole

TASK = "text-classification"
H, F, LAYERS, LABELS = 32, 64, 2, 2
MODERN = {
    "model_type": "modernbert",
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 8192,
    "local_attention": 16,
}


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("length", [128, 1024, 8192])
def test_the_products_of_attention_are_counted_apart(length: int, on_meta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on_meta:  # as for models that look at values, which the meta device refuses
        monkeypatch.setattr(size, "on_meta_else_cpu", lambda run: run(False))
    monkeypatch.setattr(size, "_known", {})
    config = BertConfig(
        hidden_size=H, intermediate_size=F, num_hidden_layers=LAYERS, num_attention_heads=2, max_position_embeddings=8192, vocab_size=30
    )
    found = count(with_class(config, TASK), TASK, length)
    assert found.attention_macs == LAYERS * 2 * length**2 * H
    assert found.macs - found.attention_macs == LAYERS * length * (4 * H * H + 2 * H * F) + H * H + H * LABELS


def test_long_rows_of_a_model_with_a_window_are_counted_as_they_are_computed() -> None:
    config = ModernBertConfig(**{key: value for key, value in MODERN.items() if key != "model_type"}, vocab_size=30, pad_token_id=0)
    short, long = (count(with_class(config, TASK), TASK, length) for length in (1024, 8192))
    assert short.attention_macs == LAYERS * 2 * 1024**2 * H
    assert long.attention_macs == 64 * short.attention_macs


def recipe(folder: Path, length: int, **target: Any) -> Any:
    random = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for split, count_rows in {"train": 60, "test": 40}.items():
        words = [" ".join(random.choice(sentiment.WORDS, random.integers(4, length))) for _ in range(count_rows)]
        rows = [{"text": text, "label": ("no", "yes")[number % 2]} for number, text in enumerate(words)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"config": MODERN, "init": "random", "task": TASK, "head": "new"}
    stages = [{"finetune": {"epochs": 0.1, "batch_size": 4}}, {"quantize": {"calibration": {"rows": 8}}}, {"export": {}}]
    whole = {"engines": ["onnxruntime"], "batch_sizes": [1], "threads": 1, **target}
    data = {"path": str(folder), "max_length": length}
    tokenizer = str(folder.with_name("tokenizer"))  # that of the tests reads 16 tokens
    AutoTokenizer.from_pretrained(sentiment.checkpoint(), model_max_length=8192).save_pretrained(tokenizer)
    return check({"name": "long", "model": model, "tokenizer": tokenizer, "data": data, "target": whole, "stages": stages, "seed": 1})


def line_of(told: str) -> str:
    return next(line for line in told.splitlines() if line.startswith("GFLOPs of a row in quantize"))


@pytest.mark.slow
def test_plan_shows_the_share_of_attention_at_each_bucket(tmp_path: Path) -> None:
    told = describe(recipe(tmp_path / "data", 8192, sequence_lengths=[1024, 4096]), tmp_path / "run")
    line = line_of(told)
    assert re.findall(r"(\d+) tokens [\d.]+ \((\d+)%\)", line) == [("1024", "86"), ("4096", "96"), ("8192", "98")]
    told = describe(recipe(tmp_path / "data", 2048, buckets="auto"), tmp_path / "run")
    assert re.findall(r"(\d+) tokens", line_of(told)) == ["128", "192", "256", "384", "512", "1024", "2048"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_buckets_are_chosen_for_long_rows_and_engines_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    made = recipe(tmp_path / "data", 2048, buckets="auto", sequence_lengths=[2048])
    report = run(made, tmp_path / "run", progress=ConsoleProgress("silent")).report
    exported = json.loads(next((tmp_path / "run").glob("stages/export-*/export.json")).read_text())
    assert all(engine["runnable"] for build in exported["builds"] for engine in build["engines"]), exported
    chosen = json.loads(next((tmp_path / "run").glob("stages/buckets-*/buckets.json")).read_text())
    assert chosen["buckets"][-1] == 2048
    assert max(chosen["tokens"].values()) > 1024
    assert report["variants"][-1]["accuracy"]["onnxruntime"]["n"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 8192])
def test_a_graph_answers_at_every_length(length: int, tmp_path: Path) -> None:
    import onnxruntime
    import torch

    from foundation.models.checkpoint import load

    made = recipe(tmp_path / "data", length, sequence_lengths=[length])
    short = made.model_copy(update={"stages": made.stages[:1]})
    run(short, tmp_path / "run", progress=ConsoleProgress("silent"))
    folder = next((tmp_path / "run").glob("stages/finetune-*"))
    prepared = Checkpoint(folder).preprocessor(TASK, length, Target(sequence_lengths=(length,)))
    graph = export_float(Checkpoint(folder), prepared, tmp_path / "model.onnx")
    rows = [" ".join(sentiment.WORDS * (length // len(sentiment.WORDS) + 1)), "good film"]
    features = prepared.encode(rows, length)
    with torch.inference_mode():
        expected = load(folder)(**{name: torch.from_numpy(value) for name, value in features.items()}).logits
    found = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, features)[0]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
