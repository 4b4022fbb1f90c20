"""Tiny data sets of sounds with texts and models of them, from random weights: what whole runs on speech are tested with."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_sounds import RATE, encoded, waveform_config

PITCHES = {"a": 400, "b": 1100, "c": 2200}
"""What is "spoken": a tone for each letter, and a pause between words."""
LETTER, GAP, PAUSE = 0.03, 0.006, 0.05
"""Seconds of a tone, of the silence behind it, and of that between words."""


def sound(text: str, random: np.random.Generator) -> np.ndarray:
    """Returns float32 [T]: the letters of a text as tones with short pauses between them."""
    parts = []
    for letter in text:
        time = np.arange(int((LETTER if letter in PITCHES else PAUSE) * random.uniform(0.9, 1.1) * RATE)) / RATE
        tone = np.sin(2 * np.pi * PITCHES[letter] * time) if letter in PITCHES else np.zeros(len(time))
        parts += [0.3 * tone, np.zeros(int(GAP * RATE))]
    clean = np.concatenate(parts)
    return (clean + 0.01 * random.standard_normal(len(clean))).astype(np.float32)


def texts(count: int, random: np.random.Generator, most: int = 5) -> list[str]:
    """Returns texts of one or two words of the letters a, b and c."""
    made = []
    for _ in range(count):
        letters = "".join(random.choice(list(PITCHES), random.integers(2, most)))
        cut = int(random.integers(1, len(letters)))
        made.append(f"{letters[:cut]} {letters[cut:]}" if len(letters) > 3 else letters)
    return made


def folder(where: Path, train: int = 600, test: int = 40, column: str = "text") -> Path:
    """Writes train.csv and test.csv with the columns audio and text, and the sounds beside them; returns the folder."""
    random = np.random.default_rng(0)
    for split, count in {"train": train, "test": test}.items():
        (where / "sounds").mkdir(parents=True, exist_ok=True)
        with (where / f"{split}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["audio", column])
            writer.writeheader()
            for index, text in enumerate(texts(count, random)):
                form = ("wav", "flac")[index % 2]
                name = f"sounds/{split}{index}.{form}"
                (where / name).write_bytes(encoded(sound(text, random), form=form.upper()))
                writer.writerow({"audio": name, column: text})
    return where


def model(kind: str = "wav2vec2", layers: int = 1, masked: bool = True) -> dict[str, Any]:
    """Returns the section `model` of a recipe: random weights, sounds of 8 kHz."""
    config = waveform_config(kind, layers, masked) | {"num_conv_pos_embedding_groups": 2}
    return {"config": config, "init": "random", "task": "speech-recognition", "head": "new", "preprocessor": {"sampling_rate": RATE}}
