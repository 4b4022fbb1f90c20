"""Zeros in a model that differs from stage to stage: its config has no one width, and no number of heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.data.splits import Data
from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig
from foundation.models.importing import import_model
from foundation.stage.context import Context
from prune.sparsify.sparsify import Sparsify
from tests.problems import raises_problem
from tests.quantize.conftest import images
from tests.told import Told

pytestmark = pytest.mark.whole

CONFIG = {"model_type": "convnext", "num_channels": 1, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 64}
TRAINED: dict[str, Any] = {"epochs": 1, "learning_rate": 1e-3}


@pytest.fixture
def convnext(tmp_path: Path) -> Artifact:
    import_model(ModelConfig(config=CONFIG, init="random", task="image-classification"), ("dark", "bright"), 0, tmp_path / "model")
    return Artifact(tmp_path / "model", {"id": "baseline", "digest": "0" * 64})


@pytest.fixture
def context(convnext: Artifact, tmp_path: Path) -> Context:
    data = Data(images(40, 0), images(10, 1), images(10, 2), ("dark", "bright"))
    made = Context("image-classification", data, 24, Target(), 0, Told(), tmp_path / "scratch")
    return replace(made, teachers=(convnext,))


@pytest.mark.parametrize("method", ["magnitude", "lasso"])
def test_it_is_trained(method: str, convnext: Artifact, context: Context, tmp_path: Path) -> None:
    stage = Sparsify(method=method, sparsity=0.5, pattern={"block": [4, 4]}, learning=TRAINED, recover=TRAINED)
    config = load(convnext.path).config
    out = tmp_path / "out"
    out.mkdir()
    stage.check(config, config, context)
    figures = stage.run(convnext, context, out)
    assert figures["sparsity"] == pytest.approx(0.5, abs=0.02)
    assert figures["recovery"]["steps"] > 0


def test_hidden_states_of_no_one_width_are_refused(convnext: Artifact, context: Context) -> None:
    config = load(convnext.path).config
    with raises_problem("recover.hidden_weight", "1", "convnext", "leave it out"):
        Sparsify(method="magnitude", recover={**TRAINED, "hidden_weight": 1.0}).check(config, config, context)
