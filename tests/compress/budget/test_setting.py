"""Which trainings a budget runs and compares, and their recipes."""

from typing import Any

import pytest

from compress.budget.setting import Setting, Studied, studied_stage
from compress.recipe import Recipe, check
from distill.distill import Distill
from foundation.training.finetune import Finetune
from tests.problems import raises_problem
from tests.tiny_recipes import tiny_vit

FINETUNE: dict[str, Any] = {"finetune": {"epochs": 3}}
DISTILL: dict[str, Any] = {"distill": {"student": {"layers": 3}, "epochs": 4, "fraction": 0.5}}


def recipe(*stages: dict[str, Any], **more: Any) -> Recipe:
    return check({**tiny_vit("tiny", layers=6), "stages": [*stages], **more})


def studied(*stages: dict[str, Any], rows: int = 20_000, depth: int = 6) -> Studied:
    return Studied.of(recipe(*stages), rows, depth)


def test_the_student_is_studied_where_there_is_one() -> None:
    assert isinstance(studied_stage(recipe(FINETUNE, DISTILL, {"quantize": {}})), Distill)
    assert isinstance(studied_stage(recipe(FINETUNE, {"quantize": {}})), Finetune)
    assert studied(FINETUNE, DISTILL).setting == Setting(10_000, 4, 3)
    assert studied(FINETUNE).setting == Setting(20_000, 3, None)


@pytest.mark.parametrize("rows", [1024, 1500, 8000, 20_000, 10**6])
@pytest.mark.parametrize("depth", [3, 4, 6, 12])
def test_short_trainings_are_short_and_vary_in_everything(rows: int, depth: int) -> None:
    one = studied(FINETUNE, DISTILL, rows=2 * rows, depth=depth)
    short = one.short()
    assert len(short) >= 8
    assert len(set(short)) == len(short)
    assert max(each.rows for each in short) <= min(4000, one.setting.rows // 2)
    assert min(each.rows for each in short) >= 64
    assert len({each.rows for each in short}) >= 4
    assert len({each.epochs for each in short}) >= 3
    assert {each.layers for each in short} >= {1, 3}
    assert all(1 <= each.layers <= depth for each in short if each.layers is not None)


def test_a_finetuning_has_no_sizes() -> None:
    short = studied(FINETUNE).short()
    assert len(short) >= 8
    assert {each.layers for each in short} == {None}


def test_layers_that_are_listed_are_no_size() -> None:
    listed = {"distill": {"student": {"init": [1, 3, 5]}, "epochs": 4}}
    assert studied(FINETUNE, listed).setting.layers is None


def test_alternatives_begin_with_the_recipe_and_count_the_rows_that_are_missing() -> None:
    found = studied(FINETUNE, DISTILL).alternatives()
    assert found[0].setting == Setting(10_000, 4, 3)
    assert {one.setting for one in found[1:]} == {
        Setting(20_000, 4, 3),
        Setting(10_000, 8, 3),
        Setting(10_000, 4, 4),
        Setting(10_000, 4, 5),
        Setting(5_000, 4, 3),
        Setting(10_000, 2, 3),
        Setting(10_000, 4, 2),
    }
    assert all(one.missing == 0 for one in found)
    whole = studied(FINETUNE).alternatives()
    assert {one.setting.rows: one.missing for one in whole} == {40_000: 20_000, 20_000: 0, 10_000: 0}


def test_the_deepest_student_has_no_deeper_alternative() -> None:
    found = studied(FINETUNE, {"distill": {"student": {"layers": 6}}}).alternatives()
    assert max(one.setting.layers or 0 for one in found) == 6


def test_the_recipe_of_a_training_differs_in_its_setting_and_ends_with_it() -> None:
    given = recipe(FINETUNE, DISTILL, {"quantize": {}}, {"export": {}}, goals={"max_drop": 0.01, "metric": "f1"})
    one = Studied.of(given, 20_000, 6)
    made = one.recipe_of(Setting(500, 2, 1))
    assert [stage.NAME for stage in made.stages] == ["finetune", "distill"]
    assert made.stages[0] == given.stages[0]
    before, after = (stage.model_dump() for stage in (given.stages[1], made.stages[1]))
    assert after["fraction"] == 500 / 20_000
    assert after["epochs"] == 2
    assert after["student"]["layers"] == 1
    assert {key for key in before if before[key] != after[key]} == {"fraction", "epochs", "student"}
    assert made.goals.metric == "f1"
    assert made.goals.max_drop is None
    assert (made.model, made.data, made.seed) == (given.model, given.data, given.seed)


def test_what_cannot_be_studied_is_refused() -> None:
    trained = {"path": "folder/model", "task": "text-classification"}
    data = {"path": "data.csv"}
    with raises_problem("--budget"):
        studied_stage(check({"name": "a", "model": trained, "data": data, "stages": [{"quantize": {}}]}))
    corpus = {"distill": {"loss": "minilmv2", "corpus": {"path": "lines.txt"}}}
    with raises_problem("--budget"):
        studied_stage(check({"name": "a", "model": trained, "data": data, "stages": [corpus]}))
    with raises_problem("--budget"):
        studied(FINETUNE, rows=1023)
