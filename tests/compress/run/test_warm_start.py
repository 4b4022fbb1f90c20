"""A run that starts from a stage of another one: python -m pytest tests/compress/run/test_warm_start.py"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.api import load_recipe
from compress.pipeline import run
from compress.recipe import check, dump, read
from compress.run.implicit import Source
from compress.run.warm_start import check_intact, started
from foundation.artifacts import artifact
from foundation.artifacts.run_folder import write_lock
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.models.config import ModelConfig
from foundation.models.importing import source_digest
from tests.tiny_recipes import tiny_vit

RECIPE: dict[str, Any] = {"name": "second", "data": {"path": "x.csv"}, "stages": [{"quantize": {}}]}


def first(folder: Path, weights: bytes = b"w") -> Path:
    """A finished run with two checkpoints in float, one with quantized weights, and evaluations."""
    made = {}
    for name, kind in (
        ("model", "checkpoint"),
        ("finetune", "checkpoint"),
        ("evaluate-finetune", "evaluation"),
        ("quantize", "checkpoint"),
    ):
        with artifact.writing(folder / "stages" / f"{name}-12345678") as out:
            (out / "model.safetensors").write_bytes(weights)
            if name == "quantize":
                (out / "quantization.json").write_text("{}")
            fields = {"stage": name, "config": {}, "seed": 0, "versions": {}, "hardware": {}, "metrics": {}, "seconds": 1.0}
            artifact.seal(out, id=name, kind=kind, key="k", parents=[], fields={**fields, "peak_memory_bytes": 1})  # type: ignore[arg-type]
        made[name] = artifact.load(folder / "stages" / f"{name}-12345678"), False, 1.0
    write_lock(folder, {"name": "first"}, {"hardware": {}, "versions": {}}, made)
    return folder


def model(**given: Any) -> dict[str, Any]:
    return {"task": "text-classification", **{key: str(value) for key, value in given.items()}}


def test_run_and_stage_name_a_checkpoint(tmp_path: Path) -> None:
    place = first(tmp_path / "first")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "model": model(run="first", stage="finetune")}))
    assert read(tmp_path / "recipe.yaml").model.path is None  # where it is read alone, no run has to be there
    found = load_recipe(tmp_path / "recipe.yaml")  # paths are those of the file
    assert found.model.path == str(place / "stages" / "finetune-12345678")
    assert load_recipe(tmp_path / "recipe.yaml", ["model.stage=model"]).model.path == str(place / "stages" / "model-12345678")
    shutil.rmtree(place)
    assert check(dump(found)).model == started(check(dump(found))).model == found.model  # as from a lock file


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"stage": "finetun"}, "model.stage: finetun given; .* has model, finetune; did you mean 'finetune'"),
        ({"stage": "evaluate-finetune"}, "model.stage: evaluate-finetune given"),
        ({"stage": "quantize"}, "model.stage: quantize given, whose weights are quantized already; model or finetune of"),
        ({"run": "absent", "stage": "finetune"}, "model.run: .*absent: not a finished run"),
    ],
)
def test_what_is_not_there_is_said(given: dict[str, Any], problem: str, tmp_path: Path) -> None:
    recipe = check({**RECIPE, "model": model(**{"run": first(tmp_path / "first"), **given})})
    with pytest.raises(InputError, match=problem):
        started(recipe)


@pytest.mark.parametrize(
    "given",
    [
        {"run": "a"},
        {"stage": "finetune"},
        {"run": "a", "stage": "finetune", "path": "owner/model"},
        {"run": "a", "stage": "finetune", "path": "b/stages/prune-12345678"},
        {"run": "a", "stage": "finetune", "config": "c.json", "init": "random"},
    ],
)
def test_run_and_stage_go_together_and_alone(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"model: .* (run and stage|path)"):
        check({**RECIPE, "model": model(**given)})


def test_the_key_holds_the_digest_and_no_place(tmp_path: Path) -> None:
    def key(place: Path) -> Any:
        found = started(check({**RECIPE, "model": model(run=place, stage="finetune")})).model
        return json.dumps([Source(id="baseline", model=found, tokenizer=None).model_dump(mode="json"), source_digest(found)])

    own = key(first(tmp_path / "first"))
    assert key(first(tmp_path / "moved")) == own
    assert key(first(tmp_path / "other", b"v")) != own
    assert str(tmp_path) not in own


def test_a_checkpoint_that_was_changed_is_not_started_from(tmp_path: Path) -> None:
    found = started(check({**RECIPE, "model": model(run=first(tmp_path / "first"), stage="finetune")})).model
    check_intact(found)
    check_intact(ModelConfig(path=found.path, task="text-classification"))
    Path(str(found.path), "model.safetensors").write_bytes(b"v")
    with pytest.raises(InputError, match=r"model.run: .*model.safetensors"):
        check_intact(found)


@pytest.mark.slow
@pytest.mark.whole
def test_the_second_run_starts_where_the_first_one_ended(tmp_path: Path) -> None:
    quiet = ConsoleProgress("quiet")
    before = run(check({**tiny_vit("a"), "stages": [{"finetune": {"epochs": 0.2}}]}), tmp_path / "a", progress=quiet).report
    raw = {**tiny_vit("b"), "model": {"run": str(tmp_path / "a"), "stage": "finetune", "task": "image-classification"}}
    after = run(check({**raw, "stages": [{"quantize": {}}]}), tmp_path / "b", progress=quiet).report
    assert [one["id"] for one in after["variants"]] == ["baseline", "quantize"]
    assert after["variants"][0]["accuracy"]["torch"]["value"] == before["variants"][0]["accuracy"]["torch"]["value"]
    locked = yaml.safe_load((tmp_path / "b" / "recipe.lock.yaml").read_text())["recipe"]["model"]
    assert (locked["run"], locked["stage"]) == (str(tmp_path / "a"), "finetune")
