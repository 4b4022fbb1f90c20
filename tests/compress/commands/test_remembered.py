"""What a plan keeps, and what makes it count again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.commands import remembered as module
from compress.commands.plan import plan
from compress.commands.remembered import remembered
from compress.recipe import check
from tests.test_pipeline import RAW

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parents[3]


class Count:
    """Counts how often it is called."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> dict[str, Any]:
        self.times += 1
        return {"counted": self.times}


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Count:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "package")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.tsv").write_text("text\tlabel\n")
    (tmp_path / "package" / "compress").mkdir(parents=True)
    (tmp_path / "package" / "compress" / "stage.py").write_text("VERSION = 1\n")
    return Count()


def test_what_did_not_change_is_counted_once(count: Count, tmp_path: Path) -> None:
    recipe = {"name": "x", "data": {"path": str(tmp_path / "data")}}
    assert [remembered(recipe, tmp_path / "run", count)["counted"] for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("what", ["recipe", "data", "new file", "stage", "code", "variable", "folder"])
def test_what_a_plan_depends_on_makes_it_count_again(what: str, count: Count, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe: dict[str, Any] = {"name": "x", "data": {"path": str(tmp_path / "data")}, "stages": [{"prune": {"sparsity": 0.5}}]}
    folder = tmp_path / "run"
    remembered(recipe, folder, count)
    if what == "recipe":
        recipe["stages"][0]["prune"]["sparsity"] = 0.6
    elif what == "data":
        (tmp_path / "data" / "train.tsv").write_text("text\tlabel\nfine\t1\n")
    elif what == "new file":
        (tmp_path / "data" / "test.tsv").write_text("text\tlabel\n")
    elif what == "stage":
        (folder / "stages" / "model-12345678").mkdir(parents=True)
        (folder / "stages" / "model-12345678" / "manifest.json").write_text("{}")
    elif what == "code":
        (tmp_path / "package" / "compress" / "stage.py").write_text("VERSION = 20\n")
    elif what == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        folder = tmp_path / "other"
    remembered(recipe, folder, count)
    assert count.times == 2
    remembered(recipe, folder, count)
    assert count.times == 2


def test_a_file_with_the_same_size_and_time_is_another_one(count: Count, tmp_path: Path) -> None:
    recipe, file = {"data": {"path": str(tmp_path / "data")}}, tmp_path / "data" / "train.tsv"
    remembered(recipe, tmp_path / "run", count)
    before = file.stat()
    file.write_text("text\tvalue\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    remembered(recipe, tmp_path / "run", count)
    assert count.times == 2


def test_errors_are_never_kept(count: Count, tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        remembered({}, tmp_path, fails)
    assert remembered({}, tmp_path, count) == {"counted": 1}


def test_a_second_plan_loads_neither_torch_nor_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("foundation.machine.cached.cache_folder", lambda: tmp_path / "cache" / "compress")  # the second plan reads it there
    file, heavy = tmp_path / "recipe.yaml", "{'torch', 'transformers', 'sklearn', 'onnx', 'scipy'}"
    file.write_text(yaml.safe_dump(RAW))
    first = plan(check(RAW), tmp_path / "run").text
    code = (
        "import sys, cli\n"
        f"sys.argv[1:] = ['plan', {str(file)!r}, '--out', {str(tmp_path / 'run')!r}]\n"
        "try:\n    cli.app()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    parts = [[line.split()[:3] for line in text.splitlines()[:10]] for text in (first, ran.stdout)]
    assert parts[0] == parts[1]
