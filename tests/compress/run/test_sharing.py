"""Whole runs that share a store: a second machine computes nothing, and a store that fails stops no run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.commands.plan import plan
from compress.pipeline import Outcome, run
from compress.recipe import check
from compress.store_settings import VARIABLE
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.remote import RemoteStore, StoreFailure
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests.problems import raises_problem
from tests.tiny_recipes import tiny_vit

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside", "no_clocks")]

RAW: dict[str, Any] = {**tiny_vit("tiny"), "stages": [{"finetune": {"epochs": 0.05, "learning_rate": 1e-3}}]}


def shared_run(folder: Path, store: Path | None, **more: Any) -> Outcome:
    address = {} if store is None else {"store": f"file://{store}"}
    return run(check({**RAW, **address}), folder, progress=ConsoleProgress("silent"), **more)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "store"


@pytest.fixture(scope="module")
def first(store: Path) -> Outcome:
    """A run without a store that gets one afterwards, as a run does whose uploads were cut off."""
    folder = store.parent / "first"
    shared_run(folder, None)
    outcome = shared_run(folder, store)
    assert all(stage.cached for stage in outcome.contents.stages), "the store is no part of a cache key"
    return outcome


def test_another_run_folder_computes_nothing(store: Path, first: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.training.finetune.Finetune.run", None)  # nothing may call it
    monkeypatch.setenv(VARIABLE, f"file://{store}")
    second = shared_run(tmp_path / "second", None)
    assert all(stage.cached for stage in second.contents.stages)
    assert {stage.id for stage in second.contents.stages} == {stage.id for stage in first.contents.stages}
    manifests = [sorted((outcome.folder / "stages").glob("*/manifest.json")) for outcome in (first, second)]
    assert [file.read_bytes() for file in manifests[0]] == [file.read_bytes() for file in manifests[1]]
    for name in ("recipe.lock.yaml", "report.json"):
        assert str(store) not in (second.folder / name).read_text(), "the environment stands in no file of the run"


def test_a_plan_says_what_the_store_gives(store: Path, first: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, made = check({**RAW, "store": f"file://{store}"}), open_run(first.folder).artifacts
    found = plan(recipe, tmp_path / "run")
    assert [(step.id, step.cached, step.stored) for step in found.steps] == [(name, True, True) for name in made]
    assert [step.disk_bytes for step in found.steps] == [each.size_bytes for each in made.values()]
    assert f"store file://{store}: {len(made)} of {len(made)} steps" in found.text
    assert not (tmp_path / "run").exists()
    here = plan(recipe, first.folder)
    assert [(step.cached, step.stored) for step in here.steps] == [(True, False)] * len(made)
    monkeypatch.setattr(RemoteStore, "look", _without(made["finetune"].key))
    partly = plan(recipe, tmp_path / "run")
    stored = [step.id for step in partly.steps if step.stored]
    assert stored == list(made)[: list(made).index("finetune")]
    assert [step.id for step in partly.steps if not step.cached] == list(made)[len(stored) :]


def test_a_store_that_stops_answering_ends_a_plan(store: Path, first: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise StoreFailure("away")

    monkeypatch.setattr(RemoteStore, "look", fail)
    with raises_problem("store", "away"):
        plan(check({**RAW, "store": f"file://{store}"}), tmp_path / "run")


def _without(key: str) -> Callable[..., Artifact | None]:
    """Returns `RemoteStore.look` of a store that does not have this artifact."""
    look = RemoteStore.look
    return lambda store, wanted, *more: None if wanted == key else look(store, wanted, *more)


def test_a_store_that_fails_later_is_warned_of_and_the_run_finishes(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise StoreFailure("away")

    monkeypatch.setattr(RemoteStore, "fetch", fail)
    outcome = shared_run(tmp_path / "third", store)
    assert not any(stage.cached for stage in outcome.contents.stages)
    [warning] = [line for line in outcome.contents.warnings if line.startswith("store: ")]
    assert "away" in warning


def test_a_store_that_does_not_answer_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        shared_run(tmp_path / "run", tmp_path / "file" / "below")
    assert caught.value.problems[0].key == "store"
    assert not (tmp_path / "run" / "stages").exists()
