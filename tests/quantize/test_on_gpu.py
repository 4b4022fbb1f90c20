"""Evaluation beside a GPU: the model computes there, and the logits are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from compress.artifacts.artifact import Artifact
from compress.run.implicit import PREDICTIONS, Evaluate
from compress.stage.context import Context
from tests.pretend_cuda import gpu

pytestmark = pytest.mark.whole


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each model was that was loaded."""
    from compress.models import checkpoint

    loaded, weights = checkpoint.load, []

    def load(*args: Any, **kwargs: Any) -> Any:
        model = loaded(*args, **kwargs)
        weights.append(next(model.parameters()).device.type)
        return model

    monkeypatch.setattr("compress.models.checkpoint.load", load)
    return weights


def test_a_checkpoint_is_evaluated_on_the_gpu(
    bert: Artifact, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    folders = [tmp_path / "cpu", tmp_path / "gpu"]
    for folder in folders:
        folder.mkdir()
    bert = Artifact(bert.path, {"id": "baseline"})
    Evaluate(id="evaluate-x").run(bert, context, folders[0])
    with gpu(monkeypatch):
        Evaluate(id="evaluate-x").run(bert, context, folders[1])
    assert seen == ["cpu", "cuda"]
    expected, found = (load_file(folder / PREDICTIONS)["logits"].numpy() for folder in folders)
    np.testing.assert_array_equal(found, expected)
