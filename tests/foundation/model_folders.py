"""Model folders for tests: what a recipe says of them, how they are broken, and that they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from foundation.core.errors import InputError
from foundation.models.config import ModelConfig
from foundation.models.importing import import_model

LABELS = ("negative", "positive")


def named(path: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"path": str(path), "task": "text-classification", **changes})


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(config: ModelConfig, out: Path, match: str, labels: tuple[str, ...] = LABELS) -> None:
    with pytest.raises(InputError, match=match) as caught:
        import_model(config, labels, 0, out)
    assert len(caught.value.lines) == 1
    assert "\n" not in str(caught.value)
