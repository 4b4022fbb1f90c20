"""A whole search without engines: one store, rows that nobody saw, a front that runs, kills, and two processes at once."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from compress.commands.clean import clean
from compress.commands.verify import verify
from compress.pipeline import run
from compress.recipe import Recipe, read
from compress.search.model import Search
from compress.search.plan import describe
from compress.search.search import Outcome
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests.compress.search.tiny import run_search, tiny_search
from tests.report_keys import undocumented, unwritten

pytestmark = pytest.mark.whole
FORKED = multiprocessing.get_context("fork")  # a process of its own that has imported everything
BUDGET: dict[str, Any] = {"budget": {"trials": 3}, "halving": {"wave": 2}}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return tiny_search(goals={"max_drop": 0.5}, **BUDGET)


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_search(recipe, tmp_path_factory.mktemp("searches") / "tiny")


def made(folder: Path) -> list[str]:
    """Returns every step that was run, not found, by any run of a search."""
    logs = folder.glob("**/log.txt")
    return [line.split()[1].rstrip(":") for log in logs for line in log.read_text().splitlines() if re.search(r"^\S+ \S+: running$", line)]


def essence(folder: Path) -> Any:
    contents = json.loads((folder / "search.json").read_text())
    candidates = [[one["number"], one["values"], one["results"], one["dropped"]] for one in contents["candidates"]]
    return candidates, [point["evaluation"]["metric"] for point in contents["front"]], contents["recommended"]["name"]


def test_what_candidates_share_is_made_once(finished: Outcome) -> None:
    contents = finished.contents.written()
    assert [one["state"] for one in contents["candidates"]] == ["finished"] * 3
    steps = made(finished.folder)
    assert steps.count("finetune") == 1
    assert steps.count("model") == 1
    assert steps.count("quantize") == 3
    own = contents["candidates"][0]
    assert own["own"]
    assert own["values"] == {"quantize.calibration.method": "mse", "quantize.smoothquant": True}


def test_the_reference_names_every_key(finished: Outcome) -> None:
    assert undocumented(finished.contents.written(), Search) == []


@pytest.mark.slow
def test_the_reference_names_every_key_of_a_search_with_engines_and_no_other(finished: Outcome, tmp_path: Path) -> None:
    """Of choices and ranges, with every step, with candidates that are dropped and that fail."""
    stages = [
        {"finetune": {"epochs": 0.2, "learning_rate": 1e-3}},
        {"prune": {"sparsity": 0.1, "granularity": ["ffn"], "recover": {"epochs": 0.2}}},
        {"quantize": {"calibration": {"rows": 32}}},
        {"export": {}},
    ]
    space = {"prune.sparsity": {"low": 0.05, "high": 0.2, "step": 0.05}, "quantize.smoothquant": [True, False]}
    goals = {"max_drop": 0.9, "min_speedup": 0.01}
    settings: dict[str, Any] = {"objectives": ["metric", "latency", "size", "throughput"], "budget": {"trials": 8}, "halving": {"wave": 8}}
    searched = run_search(tiny_search(space, stages, goals=goals, **settings), tmp_path / "engines").contents.written()
    assert undocumented(searched, Search) == []
    failed = {"candidates": [{"rungs": {"size": {"failed": "no such model"}}}]}
    missing = unwritten([searched, finished.contents.written(), failed], Search)
    assert [row for row in missing if ".goals[]." not in row] == []  # of which each kind has keys of its own


def test_candidates_are_judged_on_selection_rows_and_the_front_alone_on_the_others(finished: Outcome) -> None:
    contents = finished.contents.written()
    assert contents["rows"] == {"selection": 200, "evaluation": 360}
    for one in contents["candidates"]:
        report = json.loads((finished.folder / one["run"] / "report.json").read_text())
        assert report["variants"][-1]["accuracy"]["torch"]["n"] == 200
        assert report["variants"][-1]["accuracy"]["torch"]["value"] == one["results"]["metric"]
        assert any("no evaluation row was used" in warning for warning in report["warnings"])
        assert verify(finished.folder / one["run"], log=lambda line: None) == []
    numbers = [point["number"] for point in contents["front"]]
    best = max(one["results"]["metric"] for one in contents["candidates"])
    assert numbers == [one["number"] for one in contents["candidates"] if one["results"]["metric"] == best]
    for point in contents["front"]:
        cell = point["evaluation"]["metric"]
        assert cell["n"] == 360
        assert cell["low"] <= cell["value"] <= cell["high"]
    written = sorted(path.stem for path in finished.folder.glob("front/*.yaml"))
    assert written == sorted(point["name"] for point in contents["front"])


def test_a_point_of_the_front_is_a_recipe_that_runs(finished: Outcome, tmp_path: Path) -> None:
    [point, *_] = finished.contents.written()["front"]
    path = finished.folder / point["recipe"]
    assert path.read_text().splitlines()[1] == f"# compress run {path}"
    recipe = read(path)
    assert (recipe.name, recipe.search) == (point["name"], None)
    outcome = run(recipe, tmp_path / "run", progress=ConsoleProgress("silent"))
    found = outcome.report["variants"][-1]["accuracy"]["torch"]
    assert {key: found[key] for key in ("value", "n")} == {key: point["evaluation"]["metric"][key] for key in ("value", "n")}
    checkpoints = {name: one.digest for name, one in open_run(tmp_path / "run").artifacts.items() if one.kind == "checkpoint"}
    searched = open_run(finished.folder / point["run"]).artifacts
    assert checkpoints == {name: searched[name].digest for name in checkpoints}


def test_the_same_command_does_no_work_and_a_larger_budget_goes_on(recipe: Recipe, finished: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(finished.folder, folder, symlinks=True)
    before = sorted(path.name for path in (folder / "stages").iterdir()), essence(folder)
    run_search(recipe, folder)
    assert (sorted(path.name for path in (folder / "stages").iterdir()), essence(folder)) == before
    more = run_search(tiny_search(goals={"max_drop": 0.5}, **{**BUDGET, "budget": {"trials": 4}}), folder)
    assert [one["wave"] for one in more.contents.written()["candidates"]] == [0, 0, 1, 2]
    assert essence(folder)[0][:3] == before[1][0]
    with pytest.raises(InputError, match=r"another recipe: search\.halving\.wave differs"):
        run_search(tiny_search(goals={"max_drop": 0.5}, budget={"trials": 3}, halving={"wave": 3}), folder)


def test_a_candidate_cannot_be_judged_on_evaluation_rows_and_the_store_not_be_cleaned(finished: Outcome) -> None:
    folder = finished.folder / finished.contents.written()["candidates"][0]["run"]
    with pytest.raises(InputError, match="whose figures are of selection rows"):
        run(read(folder / "recipe.lock.yaml"), folder, progress=ConsoleProgress("silent"))
    with pytest.raises(InputError, match="shared with other runs"):
        clean(folder)


def test_the_page_shows_front_knobs_rungs_and_every_candidate(finished: Outcome) -> None:
    page = (finished.folder / "search.html").read_text()
    for words in ("The front", "Importance of the knobs", "quantize.calibration.method", "no stage trains", "the recipe itself"):
        assert words in page
    for one in finished.contents.written()["candidates"]:
        assert one["name"] in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "built-in method" not in page  # what a map says of itself where a template takes a method for a key
    assert "minmax" in page or "mse" in page


def test_plan_draws_what_the_search_draws_and_tells_the_price(recipe: Recipe, finished: Outcome, tmp_path: Path) -> None:
    lines = describe(recipe, tmp_path / "none").splitlines()
    assert not (tmp_path / "none").exists()
    assert any("4 combinations; the recipe of every one" in line for line in lines)
    assert any(line.startswith("rung untrained") and "no stage trains" in line for line in lines)
    first = [one for one in finished.contents.written()["candidates"] if one["wave"] == 0]
    told = lines[lines.index("first candidates:") + 1 :]
    assert [line.split()[0] for line in told] == [one["name"] for one in first]
    assert "3 finished" in describe(recipe, finished.folder)


def test_two_processes_share_one_study(recipe: Recipe, finished: Outcome, tmp_path: Path) -> None:
    workers = [FORKED.Process(target=run_search, args=(recipe, tmp_path / "s")) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=250)
        assert worker.exitcode == 0
    assert essence(tmp_path / "s") == essence(finished.folder)
    steps = made(tmp_path / "s")
    assert steps.count("finetune") == 1
    assert sorted(steps) == sorted(made(finished.folder))  # nothing was done twice


@pytest.mark.slow
def test_kills_change_nothing(recipe: Recipe, finished: Outcome, tmp_path: Path) -> None:
    generator, kept = random.Random(0), set[str]()
    for _ in range(4):
        worker = FORKED.Process(target=run_search, args=(recipe, tmp_path / "s"))
        worker.start()
        time.sleep(generator.uniform(0.3, 2.0))
        if worker.is_alive():
            os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()
        now = {path.parent.name for path in tmp_path.glob("s/stages/[a-z]*/manifest.json")}
        assert kept <= now
        kept = now
    run_search(recipe, tmp_path / "s")
    assert essence(tmp_path / "s") == essence(finished.folder)
    assert not list(tmp_path.glob("s/stages/.*.tmp"))
