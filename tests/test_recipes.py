"""Every shipped recipe is read, starts with its two comment lines, and runs, shrunk to tiny models and generated rows."""

from pathlib import Path

import pytest

from compress.recipe import read

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(ROOT.glob("recipes/**/*.yaml"))


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} >= {
        "quickstart",
        "sst2-minilm-ptq",
        "sst2-minilm-ptq-2693",
        "mrpc-minilm",
        "stsb-minilm",
        "cifar10-vit",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_reads_and_says_what_it_is_and_how_to_run_it(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert lines[1].startswith(f"# compress run {path.relative_to(ROOT)}")
    assert lines[2] == "# yaml-language-server: $schema=../docs/recipe.schema.json"
    recipe = read(path)
    assert recipe.name == path.stem
