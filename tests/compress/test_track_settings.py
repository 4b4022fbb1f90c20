"""The `track` key: off by default, outside of cache keys, and without credentials."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.recipe import check, dump, read, untracked
from foundation.core.errors import InputError
from foundation.core.shown import without_credentials
from tests.tiny_recipes import tiny_vit

RAW: dict[str, Any] = {**tiny_vit("tiny"), "stages": [{"finetune": {"epochs": 1}}]}
SECRET = "hunter2"
REFUSED = [
    f"https://me:{SECRET}@mlflow.example",
    f"https://{SECRET}@mlflow.example:5000",
    f"http://mlflow.example/?token={SECRET}",
    f"http://mlflow.example/#{SECRET}",
    f"http://me:{SECRET}/{SECRET}@mlflow.example",
    f"http://me:{'x' * 80}{SECRET}@mlflow.example",
    f"postgresql://me:{SECRET}@db/mlflow",
    f"sqlite:////tmp/x.db?password={SECRET}",
]


def test_nothing_is_tracked_by_default_and_a_dump_stays_as_it_was() -> None:
    recipe = check(RAW)
    assert recipe.track is None
    assert "track" not in dump(recipe)
    tracked = check({**RAW, "track": {"mlflow": "http://127.0.0.1:5000"}})
    assert dump(untracked(tracked)) == dump(recipe)
    assert check(yaml.safe_load(yaml.safe_dump(dump(tracked)))) == tracked


@pytest.mark.parametrize("uri", REFUSED)
def test_credentials_in_an_address_are_refused_and_not_shown(uri: str) -> None:
    for settings in ((RAW | {"track": {"mlflow": uri}}, ()), (RAW, (f"track={{mlflow: '{uri}'}}",)), (RAW | {"track": uri}, ())):
        with pytest.raises(InputError) as caught:
            check(*settings)
        [problem] = caught.value.problems
        assert problem.key in ("track.mlflow", "track")
        assert SECRET not in str(problem)
    with pytest.raises(InputError) as caught:
        check(RAW | {"track": {"mlflow": "https://me:pw@mlflow.example"}})
    assert "MLFLOW_TRACKING_PASSWORD" in caught.value.problems[0].allowed


@pytest.mark.parametrize(
    "uri", ["", "mlruns", "file:///tmp/mlruns", "databricks", "http://", "http:///x", "sqlite:///", "sqlite:///rel.db"]
)
def test_other_addresses_are_refused(uri: str) -> None:
    with pytest.raises(InputError) as caught:
        check(RAW | {"track": {"mlflow": uri}})
    assert "sqlite:///" in caught.value.problems[0].allowed


@pytest.mark.parametrize("project", ["", "a/b/c", "/a", "../a", "a b", "https://me:pw@wandb.example/a", "-a"])
def test_projects_are_names(project: str) -> None:
    with pytest.raises(InputError) as caught:
        check(RAW | {"track": {"wandb": project}})
    assert caught.value.problems[0].key == "track.wandb"


def test_a_place_is_needed() -> None:
    for track in ({}, {"experiment": "x"}, {"mlflow": None}):
        with pytest.raises(InputError) as caught:
            check(RAW | {"track": track})
        [problem] = caught.value.problems
        assert (problem.key, "wandb" in problem.allowed) == ("track", True)
    both = check(RAW | {"track": {"mlflow": "http://127.0.0.1:5000", "wandb": "team/project.a"}}).track
    assert both is not None
    assert both.wandb == "team/project.a"


@pytest.mark.parametrize("uri", ["http://127.0.0.1:5000", "https://mlflow.example/team/a", "http://[::1]:5000", "sqlite:////tmp/a b.db"])
def test_addresses_are_taken_as_they_are(uri: str) -> None:
    track = check(RAW | {"track": {"mlflow": uri}}).track
    assert track is not None
    assert track.mlflow == uri


def test_a_database_file_is_relative_to_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**RAW, "track": {"mlflow": "sqlite:///mlflow.db"}}), encoding="utf-8")
    track = read(file).track
    assert track is not None
    assert track.mlflow == f"sqlite:///{tmp_path}/mlflow.db"
    track = read(file, ["track.mlflow=sqlite:///other.db"]).track
    assert track is not None
    assert track.mlflow == f"sqlite:///{Path.cwd()}/other.db"


def test_only_user_password_and_query_are_hidden() -> None:
    for text in ("'https://mlflow.example:5000/a'", "data: 'a@b.example'", "'sqlite:////tmp/x.db'", "{'path': 'hf://sets/x'}"):
        assert without_credentials(text) == text
    assert without_credentials("'https://me:pw@host/a'") == "'https://...host/a'"
