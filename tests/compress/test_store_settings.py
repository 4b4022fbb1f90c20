"""The `store` key: off by default, outside of cache keys, and without credentials."""

from typing import Any

import pytest
import yaml

from compress.recipe import check, dump, untracked
from compress.store_settings import VARIABLE, store_of
from foundation.core.errors import InputError
from tests.tiny_recipes import tiny_vit

RAW: dict[str, Any] = {**tiny_vit("tiny"), "stages": [{"finetune": {"epochs": 1}}]}
SECRET = "hunter2"
REFUSED = [
    f"s3://me:{SECRET}@bucket/a",
    f"s3://{SECRET}@bucket",
    f"https://host/a?token={SECRET}",
    f"gs://b/#{SECRET}",
    f"a::s3://b/{SECRET}",
]


def test_nothing_is_shared_by_default_and_a_dump_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    recipe = check(RAW)
    assert "store" not in dump(recipe)
    assert store_of(recipe.store) is None
    shared = check({**RAW, "store": "s3://bucket/team/"})
    assert shared.store == "s3://bucket/team"
    assert dump(untracked(shared)) == dump(recipe)
    assert check(yaml.safe_load(yaml.safe_dump(dump(shared)))) == shared


def test_the_recipe_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "file:///a")
    assert store_of(None) == "file:///a"
    assert store_of("file:///b") == "file:///b"


@pytest.mark.parametrize("url", REFUSED)
def test_credentials_are_refused_and_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as caught:
        check({**RAW, "store": url})
    assert caught.value.problems[0].key == "store"
    monkeypatch.setenv(VARIABLE, url)
    with pytest.raises(InputError) as from_environment:
        store_of(None)
    assert from_environment.value.problems[0].key == VARIABLE
    if "::" not in url:  # there the secret stands for a path
        assert SECRET not in str(caught.value)
    assert SECRET not in str(from_environment.value)


@pytest.mark.parametrize("url", ["", "runs/store", "s3://", "file://relative", "/tmp/store"])
def test_other_texts_are_refused(url: str) -> None:
    with pytest.raises(InputError) as caught:
        check({**RAW, "store": url})
    assert caught.value.problems[0].key == "store"
