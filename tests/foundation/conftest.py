"""Tiny checkpoints, generated once a session, and a progress that keeps what it is told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.told import Told
from tests.word_tokenizer import write_tokenizer

WORDS = [
    "a",
    "bad",
    "dull",
    "film",
    "fine",
    "good",
    "great",
    "hate",
    "i",
    "it",
    "like",
    "love",
    "movie",
    "not",
    "poor",
    "the",
    "this",
    "very",
    "was",
    "what",
]


@pytest.fixture
def told() -> Told:
    return Told()


BERT = {
    "model_type": "bert",
    "vocab_size": len(WORDS) + 5,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
}


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 2 layers with 2 labels and a tokenizer of 25 words; never written to."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("tiny_bert")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**BERT, id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    write_tokenizer(folder, WORDS)
    return folder


@pytest.fixture(scope="session")
def tiny_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grey 8 x 8 ViT of 2 layers with 3 labels; never written to."""
    from foundation.models.config import ModelConfig
    from foundation.models.importing import import_model

    folder = tmp_path_factory.mktemp("tiny_vit")
    import_model(ModelConfig(config=VIT, init="random", task="image-classification"), ("a", "b", "c"), 0, folder)
    return folder


@pytest.fixture(scope="session")
def bert_config() -> dict[str, Any]:
    """The sizes of `tiny_bert` as a Transformers config map."""
    return dict(BERT)


@pytest.fixture(scope="session")
def vit_config() -> dict[str, Any]:
    """The sizes of `tiny_vit` as a Transformers config map."""
    return dict(VIT)


@pytest.fixture(scope="session")
def words() -> list[str]:
    """The words that the tokenizer of `tiny_bert` knows."""
    return list(WORDS)


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_bert` to break."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "source"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"
