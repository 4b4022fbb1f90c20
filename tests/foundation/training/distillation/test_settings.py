"""Losses in the settings of stages that learn from a teacher: typed, and in cache keys as the recipe gives them."""

from __future__ import annotations

from typing import Any

import pytest

from foundation.training.distillation.settings import DistillationSettings
from foundation.training.losses.distillation.hidden import Hidden
from foundation.training.losses.distillation.soft_target import SoftTarget


@pytest.mark.parametrize(
    "losses",
    [
        [{"name": "hidden", "layers": [1, 3], "weight": {"start": 0.5, "end": 0.1}}, {"name": "minilm"}],
        [{"name": "tinybert", "steps": [0.0, 0.5]}, {"name": "soft_target", "steps": [0.5, 1.0]}],
    ],
)
def test_a_dump_has_what_the_recipe_gives(losses: list[dict[str, Any]]) -> None:
    settings = DistillationSettings.model_validate({"losses": losses})
    assert settings.model_dump(mode="json")["losses"] == losses
    assert DistillationSettings(**settings.model_dump()) == settings


def test_losses_are_typed_by_their_names() -> None:
    settings = DistillationSettings.model_validate({"losses": [{"name": "hidden", "tokens": "first"}, {"name": "soft_target"}]})
    assert settings.losses == (Hidden(tokens="first"), SoftTarget())
    assert DistillationSettings(losses=(Hidden(),)).model_dump()["losses"] == [{"name": "hidden"}]
