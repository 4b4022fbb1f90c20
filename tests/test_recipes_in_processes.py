"""Every training of a shipped recipe, shrunk, takes the same first 50 steps in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.recipe import read
from foundation.machine.parallel import ALONE
from tests.ranks import in_ranks
from tests.recipe_processes import MOST, steps_of, together, trains
from tests.test_recipes import RECIPES, shrunk

pytestmark = [pytest.mark.slow, pytest.mark.whole, pytest.mark.timeout(3600)]

TRAINED = {path.stem: path for path in RECIPES if any(map(trains, read(path).stages))}
LONG = {"finetune": ["epochs=60"], "distill": ["epochs=60"], "prune": ["recover.epochs=60"], "quantize": ["qat.epochs=60"]}
FEW = {"distill": ["student.layers=1"], "prune": ["rows=64", "multiple_of=8"], "quantize": ["calibration.rows=64"]}


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_two_processes_take_the_first_steps_of_one(name: str, tmp_path: Path) -> None:
    path, recipe = TRAINED[name], read(TRAINED[name])
    settings = shrunk(recipe, tmp_path)
    for stage in recipe.stages:
        changes = [*(LONG.get(stage.NAME, []) if trains(stage) else []), *FEW.get(stage.NAME, [])]
        settings += [f"stages.{stage.id or stage.NAME}.{change}" for change in changes]
    in_ranks(2, together, path, settings, tmp_path)
    one, two = steps_of(path, settings, tmp_path / "alone", ALONE), json.loads((tmp_path / "several.json").read_text())
    assert one.keys() == two.keys()
    for label, steps in one.items():
        assert len(steps) == len(two[label]) <= MOST
        losses, others = ([loss for loss, _ in side] for side in (steps, two[label]))
        assert others == pytest.approx(losses, abs=1e-4), label
