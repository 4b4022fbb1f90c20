from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.labels.value import Numbers
from foundation.measure.metrics import metrics
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.size import Passes
from foundation.stage.context import Context
from foundation.training import train
from foundation.training.finetune import Finetune
from foundation.training.history import History
from foundation.training.state import rows_digest
from foundation.training.supervised import supervised
from foundation.training.train import Batch
from tests.foundation import tiny_gpt
from tests.problems import raises_problem

pytestmark = pytest.mark.whole


@pytest.fixture
def context(words: list[str], told: Any, tmp_path: Path) -> Context:
    draw = np.random.default_rng(0)

    def split(num_rows: int) -> Split:
        labels = draw.integers(0, 2, num_rows)
        rows = [" ".join([*draw.choice(words, 4), "great" if label else "poor"]) for label in labels]
        return Split(list(rows), ClassIds(labels.astype(np.int64)))

    data = Data(split(64), split(20), split(20), ("negative", "positive"))
    target = Target(sequence_lengths=(8,))
    return Context("text-classification", data, 32, target, 0, told, tmp_path / "scratch")


def test_it_writes_a_checkpoint_that_learned(tiny_bert: Path, context: Context, tmp_path: Path, told: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    figures = Finetune(epochs=12, learning_rate=3e-3, batch_size=16).run(Artifact(tiny_bert, {}), context, out)
    json.dumps(figures, allow_nan=False)
    assert figures["steps"] == 48
    assert figures["losses"][-1]["loss"] < figures["losses"][0]["loss"]
    assert figures["selection"]["metric"] == "accuracy"
    assert max(entry["value"] for entry in figures["selection"]["values"]) > 0.85
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= {p.name for p in out.iterdir()}
    assert load(out).config.id2label == {0: "negative", 1: "positive"}  # type: ignore[union-attr]
    assert "Finetuned for 48 steps" in (out / "README.md").read_text()
    assert any("selection" in line for line in told.lines)


def test_the_same_seed_gives_the_same_weights(tiny_bert: Path, context: Context, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Finetune(epochs=1).run(Artifact(tiny_bert, {}), context, tmp_path / name)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_the_parent_is_not_written_to(tiny_bert: Path, context: Context, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in tiny_bert.iterdir()}
    (tmp_path / "out").mkdir()
    Finetune(epochs=0.5).run(Artifact(tiny_bert, {}), context, tmp_path / "out")
    assert before == {path.name: path.read_bytes() for path in tiny_bert.iterdir()}


def test_a_wild_learning_rate_says_what_to_do(tiny_bert: Path, context: Context, tmp_path: Path) -> None:
    model_parent = Artifact(tiny_bert, {})
    broken = Finetune(epochs=1, learning_rate=1.0, warmup=0.0, id="tune")
    rows = context.data.train
    nan = Split(rows.rows, Numbers(np.full(len(rows), np.nan, np.float32)))
    regression = Context("text-regression", Data(nan, nan, nan, ("score",)), 32, context.target, 0, context.progress, tmp_path / "s")
    with raises_problem("tune", "squared_error", "nan in step 1 of 2", "lower learning_rate"):
        broken.run(model_parent, regression, tmp_path)


def test_label_smoothing_needs_classes(tiny_bert: Path, context: Context, tmp_path: Path) -> None:
    regression = Context("text-regression", context.data, 32, context.target, 0, context.progress, tmp_path)
    with raises_problem("finetune.label_smoothing", "0.1", "text-regression"):
        Finetune(label_smoothing=0.1).check(None, None, regression)


def test_work_grows_with_rows_and_epochs(context: Context) -> None:
    assert Finetune(epochs=2).work(Passes(10, 10, 2), context.data) == 10 * 2 * (3 * 64 + 20)
    assert Finetune(epochs=2, fraction=0.25).work(Passes(10, 10, 2), context.data) == 10 * 2 * (3 * 16 + 20)


def test_a_share_of_the_rows_is_trained_on(context: Context, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = []
    monkeypatch.setattr(train, "train", lambda model, objective, training: splits.append(training.split) or History())
    for name, fraction in (("whole", 1.0), ("half", 0.5), ("quarter", 0.25)):
        (tmp_path / name).mkdir()
        Finetune(fraction=fraction).run(Artifact(tiny_bert, {}), context, tmp_path / name)
    whole, half, quarter = (set(split.rows) for split in splits)
    assert [len(split) for split in splits] == [64, 32, 16]
    assert quarter < half < whole
    assert Finetune().model_dump() == Finetune(fraction=1.0).model_dump()
    assert "fraction" not in Finetune().model_dump()


def test_rows_that_belong_together_are_not_parted(context: Context, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Checkpoint(tiny_bert).config
    Finetune(fraction=0.5).check(config, None, context)
    monkeypatch.setattr(Split, "together", property(lambda self: 2))
    Finetune().check(config, None, context)
    with raises_problem("stages.finetune.fraction", "0.5"):
        Finetune(fraction=0.5).check(config, None, context)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_formula(smoothing: float, tiny_bert: Path) -> None:
    model = load(tiny_bert)
    features = {"input_ids": torch.tensor([[2, 7, 9, 3], [2, 11, 3, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
    labels = torch.tensor([1, 0])
    loss = supervised("text-classification", smoothing)(model, Batch(features, labels, np.arange(2), 0, 1))["cross_entropy"]
    logs = torch.log_softmax(model(**features).logits, 1)
    naive = torch.stack([-(1 - smoothing) * row[y] - smoothing * row.mean() for row, y in zip(logs, labels, strict=True)])
    torch.testing.assert_close(loss, naive)


def test_the_regression_loss_is_the_squared_error(tiny_bert: Path) -> None:
    model = load(tiny_bert)
    features = {"input_ids": torch.tensor([[2, 7, 3], [2, 11, 3]])}
    values = torch.tensor([0.5, 3.0])
    loss = supervised("text-regression")(model, Batch(features, values, np.arange(2), 0, 1))["squared_error"]
    torch.testing.assert_close(loss, (model(**features).logits[:, 0] - values) ** 2)


@pytest.fixture
def generation(told: Any, tmp_path: Path) -> Context:
    return Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(sequence_lengths=(8,)), 0, told, tmp_path / "scratch")


def test_a_language_model_learns_and_the_lowest_perplexity_is_kept(generation: Context, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    settings = {"epochs": 3, "learning_rate": 0.02, "batch_size": 8, "evaluate_every": 15, "warmup": 0, "schedule": "constant"}
    figures = Finetune(**settings).run(Artifact(tiny_gpt.checkpoint(), {}), generation, tmp_path / "out")
    values = {entry["step"]: entry["value"] for entry in figures["selection"]["values"]}
    assert figures["selection"]["metric"] == "perplexity"
    assert min(values.values()) < 20 < tiny_gpt.VOCABULARY / 2
    assert figures["selection"]["best_step"] == min(values, key=values.__getitem__)
    assert max(values, key=values.__getitem__) != figures["selection"]["best_step"]
    split = generation.data.selection
    answers = predict(load(tmp_path / "out"), tiny_gpt.prepared(), split.rows, 64)
    assert metrics("text-generation", answers, split.labels)["perplexity"] == pytest.approx(min(values.values()), rel=1e-4)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.use_cache is False


def test_micro_batches_change_nothing_but_rounding(generation: Context, tmp_path: Path) -> None:
    weights = []
    for micro in (None, 3):
        out = tmp_path / str(micro)
        out.mkdir()
        again = replace(generation, scratch=tmp_path / f"scratch-{micro}")
        Finetune(epochs=0.1, batch_size=8, micro_batch_size=micro, keep="last").run(Artifact(no_dropout(tmp_path), {}), again, out)
        weights.append(load(out).state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=2e-4, rtol=1e-3)


def no_dropout(folder: Path) -> Path:
    """Returns a copy of the tiny model without dropout, whose masks depend on the size of a batch."""
    target = folder / "no_dropout"
    if not target.exists():
        shutil.copytree(tiny_gpt.checkpoint(), target)
        config = json.loads((target / "config.json").read_text())
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_killed_training_of_blocks_belongs_to_these_blocks_alone() -> None:
    rows = [np.arange(5000, dtype=np.int32) + start for start in range(3)]
    labels = np.zeros((3, 2), np.int32)
    other = [row.copy() for row in rows]
    other[1][2500] += 1
    assert rows_digest(rows, labels) == rows_digest([row.copy() for row in rows], labels)
    assert rows_digest(rows, labels) != rows_digest(other, labels)
