"""Digits of scikit-learn with captions, and a recipe of a tiny CLIP from random weights that learns to find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress.reading.images import digits
from tests import tiny_towers

TASK = "image-text-retrieval"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LENGTH = 16
"""Tokens of a caption."""


def folder(where: Path, train: int = 600, test: int = 120) -> Path:
    """Writes images/N.png, train.jsonl and test.jsonl, whose images have one caption or two by turns; returns the folder."""
    (where / "images").mkdir(parents=True, exist_ok=True)
    for split, count in {"train": train, "test": test}.items():
        lines = []
        for number, file in enumerate([file for file in digits() if file.split == split][:count]):
            name = f"images/{split}-{number}.png"
            (where / name).write_bytes(file.data)
            texts = [f"a {WORDS[int(file.label)]}", f"the digit {file.label}"]
            lines.append(json.dumps({"image": name, "caption": texts if number % 2 else texts[number // 2 % 2]}))
        (where / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return where


def recipe(data: Path, stages: list[Any], kind: str = "clip", **changes: Any) -> dict[str, Any]:
    """Returns a recipe of a model from random weights."""
    return {
        "name": "tiny",
        "seed": 1,
        "tokenizer": {"train": "bpe", "vocab_size": tiny_towers.TOKENS},
        "model": {"config": tiny_towers.config(kind, positions=LENGTH), "init": "random", "task": TASK},
        "data": {"path": str(data), "columns": {"image": "image", "text": "caption"}, "max_length": LENGTH},
        "target": {"engines": ["onnxruntime"], "batch_sizes": [1, 2], "sequence_lengths": [LENGTH], "threads": 1},
        "stages": stages,
        **changes,
    }
