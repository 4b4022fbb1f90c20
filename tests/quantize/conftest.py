"""Tiny checkpoints of random weights, data that needs no files, and a progress that keeps what it is told."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.stage.context import Context
from tests import tiny_language_models as tiny
from tests.told import Told
from tests.word_tokenizer import write_tokenizer

WORDS = ["bad", "dull", "film", "fine", "good", "great", "hate", "like", "love", "movie", "not", "poor", "the", "very", "was"]
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def sentences(num: int, seed: int) -> Split:
    random = np.random.default_rng(seed)
    rows = [" ".join(random.choice(WORDS, random.integers(2, 12))) + f" {i}" for i in range(num)]
    return Split(list(rows), ClassIds(random.integers(0, 2, num)))


def images(num: int, seed: int) -> Split:
    """Random grey PNG images of 8 x 8 with random labels."""
    random, rows = np.random.default_rng(seed), []
    for _ in range(num):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(file, "PNG")
        rows.append(file.getvalue())
    return Split(list(rows), ClassIds(random.integers(0, 2, num)))


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 2 layers with 2 labels, weights large enough to give logits of size, and a tokenizer; never written to."""
    return write_bert(tmp_path_factory.mktemp("tiny_bert"))


def write_bert(folder: Path, layers: int = 2) -> Path:
    from transformers import AutoModelForSequenceClassification, BertConfig

    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers, "vocab_size": len(WORDS) + 5, "max_position_embeddings": 40}
    config = BertConfig(**sizes, id2label={0: "negative", 1: "positive"})
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    write_tokenizer(folder, WORDS)
    return folder


@pytest.fixture(scope="session")
def tiny_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grey ViT of 2 layers for images of 8 x 8 with 2 labels, weights large enough to give logits of size; never written to."""
    from foundation.models.checkpoint import load, save
    from foundation.models.config import ModelConfig
    from foundation.models.importing import import_model

    config = {**SIZES, "model_type": "vit", "image_size": 8, "patch_size": 2, "num_channels": 1}
    drawn, folder = tmp_path_factory.mktemp("drawn_vit"), tmp_path_factory.mktemp("tiny_vit")
    import_model(ModelConfig(config=config, init="random", task="image-classification"), ("dark", "bright"), 0, drawn)
    model = load(drawn)
    for parameter in model.parameters():
        parameter.data *= 6 if parameter.ndim > 1 else 1
    save(model, drawn, folder, "large weights")
    return folder


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def context(told: Told, tmp_path: Path) -> Context:
    data = Data(sentences(200, 0), sentences(40, 1), sentences(60, 2), ("negative", "positive"))
    return Context("text-classification", data, 24, Target(sequence_lengths=(8, 16)), 0, told, tmp_path)


@pytest.fixture
def image_context(told: Told, tmp_path: Path) -> Context:
    data = Data(images(200, 0), images(40, 1), images(60, 2), ("dark", "bright"))
    return Context("image-classification", data, 24, Target(), 0, told, tmp_path)


@pytest.fixture
def vit(tiny_vit: Path) -> Artifact:
    return Artifact(tiny_vit, {})


@pytest.fixture
def bert(tiny_bert: Path) -> Artifact:
    return Artifact(tiny_bert, {})


@pytest.fixture
def blocks_context(told: Told, tmp_path: Path) -> Context:
    """A context of blocks for a tiny language model."""
    return Context("text-generation", tiny.data(), tiny.LENGTH, Target(sequence_lengths=(tiny.LENGTH,)), 0, told, tmp_path / "scratch")
