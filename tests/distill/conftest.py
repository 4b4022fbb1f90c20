"""Tiny checkpoints of every shape that a student can have, rows that need no files, and a progress that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.labels.tasks import Task
from foundation.labels.value import Numbers
from foundation.models.layers.conv1d import stock_state, with_linears
from foundation.stage.context import Context
from tests.told import Told
from tests.word_tokenizer import write_tokenizer

WORDS = ["bad", "dull", "film", "fine", "good", "great", "hate", "like", "love", "movie", "not", "poor", "the", "very", "was"]
VOCABULARY = len(WORDS) + 5
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0}
SIZES = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
CONFIGS: dict[str, Callable[..., Any]] = {
    "bert": lambda **changes: transformers.BertConfig(**{**TEXT, **SIZES, **changes}),
    "roberta": lambda **changes: transformers.RobertaConfig(**{**TEXT, **SIZES, "type_vocab_size": 1, **changes}),
    "distilbert": lambda **changes: transformers.DistilBertConfig(
        **{**TEXT, "n_layers": 4, "dim": 16, "n_heads": 4, "hidden_dim": 24, **changes}
    ),
    "gpt2": lambda **changes: transformers.GPT2Config(
        **{
            "vocab_size": VOCABULARY,
            "n_positions": 40,
            "pad_token_id": 0,
            "n_layer": 4,
            "n_embd": 16,
            "n_head": 4,
            "n_inner": 24,
            **changes,
        }
    ),
    "vit": lambda **changes: transformers.ViTConfig(**{**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1, **changes}),
}
LABELS = {1: ("score",), 2: ("negative", "positive"), 3: ("negative", "positive", "neither")}


@cache
def _model(kind: str, changes: tuple[tuple[str, Any], ...]) -> nn.Module:
    config = CONFIGS[kind](**dict(changes))
    auto = transformers.AutoModelForImageClassification if kind == "vit" else transformers.AutoModelForSequenceClassification
    with torch.random.fork_rng():
        torch.manual_seed(len(changes))
        model = auto.from_config(config).eval()
        with torch.no_grad():  # larger than drawn, so that logits, hidden states and attention differ from row to row
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * (0.8 if parameter.ndim > 1 else 0.3))
    return with_linears(model)  # as `foundation.models.checkpoint.load` gives it


@pytest.fixture(scope="session")
def make_model() -> Callable[..., nn.Module]:
    """Gives a model of 4 layers of a kind (bert, roberta, distilbert, gpt2, vit), config keys changed as asked; a new one each time."""
    import copy

    return lambda kind, **changes: copy.deepcopy(_model(kind, tuple(sorted(changes.items()))))


@pytest.fixture(scope="session")
def make_features() -> Callable[..., dict[str, torch.Tensor]]:
    """Gives random inputs of a kind of model: `rows` of up to `length` tokens, each row after the first shorter."""

    def make(kind: str, rows: int = 3, length: int = 9, seed: int = 0, padding: int = 0) -> dict[str, torch.Tensor]:
        random = np.random.default_rng(seed)
        if kind == "vit":
            return {"pixel_values": torch.from_numpy(random.standard_normal((rows, 1, 8, 8), np.float32))}
        lengths = np.maximum(2, length - 2 * np.arange(rows))
        mask = np.arange(length + padding) < lengths[:, None]
        ids = random.integers(5, VOCABULARY, (rows, length))
        ids = np.where(mask, np.pad(ids, ((0, 0), (0, padding))), 0)
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask.astype(np.int64))}

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., nn.Module]) -> Callable[..., Path]:
    """Gives the folder of a checkpoint with a tokenizer or an image processor; never written to."""
    from foundation.artifacts.artifact import write_json
    from foundation.models.inputs.images import image_settings

    @cache
    def write(kind: str, words: tuple[str, ...] = tuple(WORDS), **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        model: Any = make_model(kind, **changes)
        names = LABELS[model.config.num_labels]
        model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
        model.save_pretrained(folder, state_dict=stock_state(model))
        if kind == "vit":
            write_json(folder / "preprocessor_config.json", image_settings(model.config))
        else:
            write_tokenizer(folder, list(words))
        return folder

    return write


def sentences(num_rows: int, seed: int, num_labels: int = 2) -> Split:
    """Rows that are positive where they hold 'great'; with one label, the share of their words that are 'great'."""
    draw = np.random.default_rng(seed)
    words = [list(draw.choice(WORDS, draw.integers(1, 9))) for _ in range(num_rows)]
    rows = [" ".join([*row, "great" if i % 2 else "poor"]) for i, row in enumerate(words)]
    if num_labels == 1:
        return Split(list(rows), Numbers(np.array([row.split().count("great") / len(row.split()) for row in rows], np.float32)))
    return Split(list(rows), ClassIds(np.array(["great" in row.split() for row in rows], np.int64)))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def make_context(checkpoint: Callable[..., Path], told: Told, tmp_path: Path) -> Callable[..., Context]:
    """Gives a context of a run whose baseline is a checkpoint, made by a stage of the given name."""

    def make(teacher: Path | None = None, made_by: str = "model", num_labels: int = 2) -> Context:
        splits = [sentences(num_rows, seed, num_labels) for seed, num_rows in enumerate((48, 20, 20))]
        data = Data(splits[0], splits[1], splits[2], LABELS[num_labels])
        task: Task = "text-regression" if num_labels == 1 else "text-classification"
        baseline = Artifact(teacher or checkpoint("bert", num_labels=num_labels), {"id": "baseline", "stage": made_by, "digest": "0" * 64})
        return Context(
            task, data, 16, Target(sequence_lengths=(8,)), 0, told, tmp_path / "scratch", {"baseline": baseline}, teachers=(baseline,)
        )

    return make
