"""Settings that all trainings of a recipe share, and what a dump leaves out of them."""

from __future__ import annotations

import pytest

from distill.distill import Distill
from foundation.training.finetune import Finetune
from foundation.training.settings import TrainingSettings
from foundation.training.train import TrainConfig
from prune.choices import Recover
from prune.sparsify.settings import Learning
from quantize.choices import Qat

CHANGED = {"epochs": 5, "batch_size": 9, "schedule": "cosine", "lora": {"rank": 2}, "optimizer": {"name": "lamb"}}


@pytest.mark.parametrize("kind", [Finetune, Distill, Recover, Learning, Qat])
def test_the_loop_gets_the_settings_that_a_stage_was_given(kind: type[TrainingSettings]) -> None:
    given = kind.model_validate(CHANGED)
    config = TrainConfig.of(given, look_first=True)
    assert config.look_first
    for name in TrainingSettings.model_fields:
        assert getattr(config, name) == getattr(given, name)


def test_a_later_key_is_dumped_only_if_it_is_given() -> None:
    assert "optimizer" not in Recover().model_dump()
    assert Recover.model_validate(CHANGED).model_dump()["optimizer"] == {"name": "lamb"}
    assert {"loss", "thresholds", "optimizer"}.isdisjoint(Finetune().model_dump())
    assert "optimizer" in TrainConfig.of(Recover()).model_dump()  # which checkpoints of trainings name
