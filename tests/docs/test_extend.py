"""The pages that show how to extend the project: their files and edits are made in a copy of it, and the tests they show are run there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT, Block, blocks

pytestmark = pytest.mark.whole

PAGES = sorted((ROOT / "docs" / "how-to" / "extend").glob("*.md"))
PACKAGES = ("compress", "foundation", "distill", "prune", "quantize", "export", "triton_repo", "tests", "recipes", "docs")
TABLE_TESTS = ("tests/compress/test_tasks.py", "tests/compress/report/test_page.py")
"""Tests of the project that go through tables: a new row has to leave them as they are."""
FILES = ("cli.py", "pyproject.toml", "README.md", "mkdocs.yml")


ALL_AT_ONCE: dict[str, Any] = {
    "name": "extended",
    "model": {
        "config": {
            "model_type": "vit",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 8,
            "patch_size": 4,
            "num_channels": 1,
        },
        "init": "random",
        "task": "image-regression",
    },
    "data": {"path": "sklearn:digits"},
    "target": {"engines": ["onnx_reference"], "batch_sizes": [1]},
    "stages": [
        {"finetune": {"epochs": 2, "learning_rate": 1.0e-3}},
        {"distill": {"student": {"layers": 1}, "losses": [{"name": "logit_matching"}], "hard_weight": 1.0, "epochs": 1}},
        {"prune": {"method": "chance", "sparsity": 0.3, "multiple_of": 8, "allocation": "uniform", "recover": {"epochs": 0.5}}},
        {"quantize": {"scheme": "w6a16", "calibration": {"rows": 32}}},
        {"export": {}},
    ],
}
"""A recipe with the engine, task, scheme, pruning method and loss of the pages."""


def files_of(page: Path) -> list[Block]:
    """Returns the blocks of a page that are files, or edits of files."""
    return [block for block in blocks(page) if block.title and block.language in ("python", "diff")]


def edited(text: str, block: Block) -> str:
    """Returns a file with the hunks of a diff block applied; hunks are parted by @@, and each has to fit in exactly one place."""
    for hunk in block.body.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(before) == 1, f"{block}: these lines are in {block.title} {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    return text


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with what all of the pages say."""
    folder = tmp_path_factory.mktemp("extended")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for name in FILES:
        shutil.copyfile(ROOT / name, folder / name)
    for page in PAGES:
        for block in files_of(page):
            path = folder / str(block.title)
            if block.language == "diff":
                path.write_text(edited(path.read_text(encoding="utf-8"), block), encoding="utf-8")
            else:
                assert not path.exists(), f"{block}: {block.title} exists already"
                path.write_text(block.body, encoding="utf-8")
    return folder


def run(tree: Path, *command: str, also: tuple[int, ...] = ()) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode in (0, *also), result.stdout + result.stderr


@pytest.mark.slow
def test_all_of_them_run_in_one_recipe(tree: Path) -> None:
    (tree / "extended.yaml").write_text(yaml.safe_dump(ALL_AT_ONCE), encoding="utf-8")
    run(tree, "cli.py", "run", "extended.yaml", "--out", "run", "--quiet", also=(3,))
    report = json.loads((tree / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["metric"]["name"] == "pearson"
    last = report["variants"][-1]
    assert last["stages"] == ["finetune", "distill", "prune", "quantize"]
    assert last["quantization"]["scheme"] == "w6a16"
    assert [variant["pruning"]["method"] for variant in report["variants"] if variant["pruning"]] == ["chance"]
    cells = {engine: cell["value"] for engine, cell in last["accuracy"].items() if cell.get("value") is not None}
    assert set(cells) == {"torch", "onnx_reference"}
    assert abs(cells["torch"] - cells["onnx_reference"]) < 1e-3
    timed = {(row["engine"], row["precision"]) for variant in report["variants"] for row in variant["latency"]}
    assert {("onnx_reference", "w6a16"), ("onnx_reference", "fp32")} <= timed


@pytest.mark.slow
def test_the_tests_of_the_pages_pass(tree: Path) -> None:
    tests = [str(block.title) for page in PAGES for block in files_of(page) if str(block.title).startswith("tests/")]
    assert len(tests) >= 3
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *TABLE_TESTS)


def test_the_recipes_of_the_pages_are_read_with_what_was_added(tree: Path) -> None:
    pages = [str(page.relative_to(ROOT)) for page in PAGES]
    code = (
        "from tests.docs.blocks import ROOT, blocks, check_recipe\n"
        f"for page in {pages!r}:\n"
        "    for block in blocks(ROOT / page):\n"
        "        if block.language == 'yaml':\n"
        "            check_recipe(block)\n"
    )
    run(tree, "-c", code)


def test_the_code_of_the_pages_is_formatted_and_linted(tree: Path) -> None:
    written = [str(block.title) for page in PAGES for block in files_of(page) if str(block.title).endswith(".py")]
    run(tree, "-m", "ruff", "check", "--no-cache", *written)
    run(tree, "-m", "ruff", "format", "--no-cache", "--check", *written)


def test_a_hunk_that_does_not_fit_is_found() -> None:
    block = Block("page.md", 1, "diff", "file.py", " a\n-b\n+c\n", None)
    assert edited("a\nb\n", block) == "a\nc\n"
    for text in ("a\nx\n", "a\nb\na\nb\n"):
        with pytest.raises(AssertionError, match="times"):
            edited(text, block)
