"""The files of a checkpoint that a folder for another program shares with it: config, tokenizer and preprocessor, as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

TOKENIZER = "tokenizer_config.json"
OWN = frozenset({"manifest.json", "quantization.json", "quantization.safetensors", "README.md"})
"""Files of a checkpoint that no other program reads; a folder has a README of its own."""
WEIGHTS = (".safetensors", ".index.json")
"""Endings of the files with weights."""


def copy_modules(folder: Path, out: Path) -> None:
    """Copies the folders of a checkpoint to an existing folder: the modules of sentence-transformers (1_Pooling/ ...)."""
    for file in sorted(folder.iterdir()):
        if file.is_dir():
            shutil.copytree(file, out / file.name)


def copy_settings(folder: Path, out: Path, *, weights: bool = False) -> None:
    """Copies the settings of a checkpoint to an existing folder, and its weights if wanted; folders of modules are the caller's."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name not in OWN and (weights or not file.name.endswith(WEIGHTS)):
            shutil.copyfile(file, out / file.name)
