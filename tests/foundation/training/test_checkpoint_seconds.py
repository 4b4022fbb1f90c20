"""What a kill within the first epoch costs: python -m pytest tests/foundation/training/test_checkpoint_seconds.py"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from foundation.labels.classes import ClassIds
from foundation.training.train import Batch, TrainConfig
from tests.foundation.training.test_train import Dies, Killed, run

pytestmark = pytest.mark.whole


@pytest.mark.first(1)
@pytest.mark.parametrize("seconds", [7, 25, 59, 200])
def test_a_kill_in_the_first_epoch_costs_a_minute_at_most(
    seconds: int, tiny_bert: Path, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on with each step; a step that takes longer is all that is lost."""

    class Clocked(Dies):
        def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
            clock.append(clock[-1] + seconds)
            return super().__call__(model, batch)

    sentences = [f"good {number}" for number in range(22)], ClassIds(np.arange(22) % 2)
    clock, killed, default = [0.0], 13, TrainConfig.model_fields["checkpoint_seconds"].default
    monkeypatch.setattr("foundation.training.train.time", SimpleNamespace(monotonic=lambda: clock[-1]))
    small = {"epochs": 1, "batch_size": 1, "checkpoint_seconds": default}
    with pytest.raises(Killed):
        run(tiny_bert, sentences, told, tmp_path, Clocked(killed), **small)
    run(tiny_bert, sentences, told, tmp_path, **small)
    resumed = int(re.search(r"resumed after step (\d+) of 22", "".join(told.lines))[1])  # type: ignore[index]
    assert (killed - resumed) * seconds <= 60
