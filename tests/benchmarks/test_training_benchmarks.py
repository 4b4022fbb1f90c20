"""What the benchmarks of trainings compute by themselves: rules of large batches, bytes that are alive, and how far a law is off."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / "benchmarks" / "training"
pytestmark = pytest.mark.whole


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module


@pytest.mark.parametrize(("optimizer", "rate"), [("lamb", 5e-4 * 32**0.5), ("lars", 5e-4 * 32)])
def test_a_large_batch_takes_the_rate_of_its_rule(load: Any, optimizer: str, rate: float) -> None:
    module = load("large_batches")
    small, large = (dict(one.split("=") for one in module.settings_of(optimizer, batch, 5e-4)) for batch in (32, 1024))
    assert float(small["stages.finetune.learning_rate"]) == 5e-4
    assert float(large["stages.finetune.learning_rate"]) == pytest.approx(rate, rel=1e-5)
    assert float(large["stages.finetune.warmup"]) == pytest.approx(32 * float(small["stages.finetune.warmup"]))
    assert large["stages.finetune.batch_size"] == "1024"
    assert large["stages.finetune.optimizer"] == f"{{name: {optimizer}}}"


def test_a_warm_up_takes_no_more_than_half_of_the_steps(load: Any) -> None:
    module = load("large_batches")
    assert "stages.finetune.warmup=0.5" in module.settings_of("lars", 65536, 1e-4)


def test_bytes_are_those_that_backward_needs(load: Any) -> None:
    module = load("saved_activations")
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    rows = torch.randn(5, 8)
    with module.Alive() as alive:
        result = layers(rows).square().sum()
        kept = alive.bytes([*layers.parameters(), rows])
    # the result of tanh, the input of the square, which is the result of the last layer, and the sum
    assert kept == 4 * (5 * 16 + 5 * 4 + 1)
    assert result.requires_grad
