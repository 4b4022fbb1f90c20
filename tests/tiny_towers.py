"""Tiny models with two towers, and images for them: what whole runs on images and texts are tested with."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from foundation.models.inputs.tokenizer import TrainedTokenizer, train_bpe

TASK = "image-text"
COLOURS = {"deep_blue": (30, 40, 200), "green": (40, 180, 40), "red": (210, 40, 30)}
LENGTH = 24
"""Tokens of a text."""
TOKENS = 270


def image(name: str, random: np.random.Generator, size: int = 8) -> bytes:
    """Returns a PNG of a colour, with noise."""
    pixels = np.array(COLOURS[name]) + random.normal(0, 25, (size, size, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def folder(where: Path, train: int = 90, test: int = 42) -> Path:
    """Writes split/CLASS/N.png; returns the folder."""
    random = np.random.default_rng(0)
    for split, count in {"train": train, "test": test}.items():
        for index in range(count):
            name = list(COLOURS)[index % len(COLOURS)]
            file = where / split / name / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(image(name, random))
    return where


def config(kind: str = "clip", layers: int = 1, positions: int = LENGTH, vocabulary: int | None = None) -> dict[str, Any]:
    """Returns the config of a model of 8 x 8 images."""
    tower = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 64}
    text = {**tower, "max_position_embeddings": positions} | ({} if vocabulary is None else _special(vocabulary))
    made = {"model_type": kind, "text_config": text, "vision_config": {**tower, "image_size": 8, "patch_size": 4}}
    return {**made, "projection_dim": 24} if kind == "clip" else made


def _special(vocabulary: int) -> dict[str, int]:
    return {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}


def tokenizer() -> TrainedTokenizer:
    """Returns a tokenizer of the prompts that tests use."""
    texts = [f"a photo of a {name}" for name in COLOURS] + [f"something {name}" for name in COLOURS]
    return train_bpe(texts, TOKENS, pads=True, starts=False)


def stock(kind: str = "clip", layers: int = 1, seed: int = 0) -> Any:
    """Returns a model of Transformers with random weights, large enough that its vectors differ."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(seed)
    given = config(kind, layers, vocabulary=TOKENS)
    model = AutoModel.from_config(AutoConfig.for_model(given.pop("model_type"), **given)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1 and "probe" not in name:
                value.normal_(std=0.2)
            elif value.ndim == 1:  # vectors that differ, so that graphs of other weights need no other trace
                value.add_(0.05 * torch.randn_like(value))
        model.logit_scale.fill_(2.0)
        if hasattr(model, "logit_bias"):
            model.logit_bias.fill_(-1.0)
    return model


def checkpoint(where: Path, kind: str = "clip", layers: int = 1) -> Path:
    """Writes a trained model as Transformers does: with tokenizer and image processor; returns the folder."""
    from transformers import CLIPImageProcessor

    stock(kind, layers).save_pretrained(where)
    tokenizer().write(where)
    CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(where)
    return where


def recipe(data: Path, stages: list[Any], kind: str = "clip", **changes: Any) -> dict[str, Any]:
    """Returns a recipe of a model from random weights."""
    return {
        "name": "tiny",
        "seed": 1,
        "tokenizer": {"train": "bpe", "vocab_size": TOKENS},
        "model": {"config": config(kind), "init": "random", "task": TASK},
        "data": {"path": str(data), "prompts": ["a photo of a {}", "something {}"], "max_length": LENGTH},
        "target": {"engines": ["onnxruntime"], "batch_sizes": [1, 2], "sequence_lengths": [LENGTH], "threads": 1},
        "stages": stages,
        **changes,
    }
