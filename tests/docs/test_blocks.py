"""Every code block of README and documentation: shell through the command line, Python executed, YAML read as recipes, whole pages run.

What a block needs is small here: models are tiny, data generated, and each `compress run` gets the settings that shrink its recipe. Runs of
whole pages are marked slow; their commands and recipes are checked in every test run all the same.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

import cli
from compress.recipe import check, dump, read
from tests.docs.blocks import PAGES, PROSE, ROOT, Block, blocks, check_recipe, commands, every_block
from tests.docs.shrunk import shrunk

BLOCKS = every_block()
LANGUAGES = ("bash", "python", "yaml", "diff")
EXAMPLES = "docs/how-to/extend/"
"""Pages whose files and edits are tried in a copy of the project (`test_extend`)."""
CHEAP = ("plan", "init", "list", "doctor", "clean", "report", "verify")
"""Commands that run in every test run, where what they work on is there."""
FINISHED = (0, 3, 4)
"""Exit statuses of a run that went to its end: tiny models miss goals, and a busy machine leaves some unjudged."""


def of(language: str, *, example: bool = False) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and block.page.startswith(EXAMPLES) == example]


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(b.language in languages and b.reason is None for b in blocks(page)) and EXAMPLES not in str(page)]


def test_every_block_has_a_language_that_is_tested() -> None:
    unknown = [f"{block}: {block.language!r}" for block in BLOCKS if block.language not in (*LANGUAGES, *PROSE)]
    assert unknown == []


def test_blocks_that_another_test_runs_are_run_by_it() -> None:
    run_elsewhere = [block for block in BLOCKS if block.runner is not None]
    assert run_elsewhere
    for block in run_elsewhere:
        assert f'"{block.page}"' in (ROOT / str(block.runner)).read_text(encoding="utf-8"), f"{block}: {block.runner} does not run it"


def test_blocks_that_are_not_run_say_why_and_are_few() -> None:
    left_out = [block for block in BLOCKS if block.reason is not None]
    for block in left_out:
        print(f"not run: {block}: {block.reason}")
        assert block.language in ("bash", "python"), f"{block}: only shell and Python may be left out"
        assert len(str(block.reason)) > 20, f"{block}: give the reason"
    code = [block for block in BLOCKS if block.language in ("bash", "python", "yaml", "diff")]
    assert len(left_out) <= len(code) / 4, f"{len(left_out)} of {len(code)} blocks are not run"


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_recipes_are_read(block: Block) -> None:
    check_recipe(block)


def test_the_recipe_of_the_readme_is_the_shipped_one() -> None:
    (block,) = [block for block in of("yaml") if block.page == "README.md"]
    shipped = read(ROOT / "recipes" / "sst2-minilm.yaml")
    assert dump(check(yaml.safe_load(block.body))) == dump(shipped)


@pytest.mark.parametrize("block", of("bash") + of("bash", example=True), ids=str)
def test_commands_exist_with_their_options(block: Block) -> None:
    """Blocks that are not run, too."""
    group: Any = typer.main.get_command(cli.app)
    for line in commands(block):
        words = shlex.split(line.split("|")[0])
        if "torchrun" in words:
            words = ["compress", *words[words.index("run") :]]
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), f"{block}: {line}"
        if words[0] != "compress":
            assert block.reason or block.runner or words[0] in ("make", "."), f"{block}: {line}: only compress is run here"
            continue
        if words[1:] == ["--help"]:
            continue
        command = group.commands[words[1]]
        options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        assert {word for word in words[2:] if word.startswith("-")} <= options, f"{block}: {line}"


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_is_python(block: Block) -> None:
    ast.parse(block.body)


class Page:
    """A page in a folder of its own: its files are written and its blocks run there, in order."""

    def __init__(self, page: Path, folder: Path, whole: bool) -> None:
        self.page, self.folder, self.whole = page, folder, whole
        self.names: dict[str, Any] = {"__name__": "__page__"}
        self.has_run = False
        self.ran: list[str] = []

    def run(self) -> None:
        for block in blocks(self.page):
            if block.reason is None and block.runner is None:
                {"yaml": self.write, "python": self.execute, "bash": self.call}.get(block.language, lambda block: None)(block)

    def write(self, block: Block) -> None:
        if block.title:
            (self.folder / block.title).write_text(block.body, encoding="utf-8")

    def execute(self, block: Block) -> None:
        if self.has_run and not self.whole:
            return
        exec(compile(block.body, str(block), "exec"), self.names)
        self.ran.append(f"{block}: python")

    def call(self, block: Block) -> None:
        for line in re.sub(r"\\\n\s*", " ", block.body).splitlines():
            expected = re.search(r"# exit status (\d+)", line)
            words = list(takewhile(lambda word: word != "|", shlex.split(line, comments=True)))
            if not words or words[0] != "compress":
                continue
            if words[1] in ("run", "bench"):
                self.has_run = True
            if not self.whole and (words[1] not in CHEAP or self.has_run):
                continue
            if words[1] == "generate":
                words += ["--max-tokens", "4"]  # a tiny model reads 16
            if words[1] in ("run", "plan") and not expected:
                words += shrunk(self.folder, words[2], words[3:])
            result = CliRunner().invoke(cli.app, words[1:])
            allowed = (int(expected[1]),) if expected else FINISHED if words[1] in ("run", "bench", "report") else (0,)
            assert result.exit_code in allowed, f"{block}: {line}\n{result.stdout}{result.stderr}{result.exception!r}"
            self.ran.append(f"{block}: {line}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # Python blocks may start `compress`
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)  # fewer engines: starting each takes seconds
    monkeypatch.setattr("foundation.measure.latency.MAX_SAMPLES", 30)
    return tmp_path


@pytest.mark.first(1)
@pytest.mark.parametrize("page", pages_with("bash", "python"), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs_up_to_its_first_run(page: Path, folder: Path) -> None:
    """Plans, errors and Python: everything that needs no training and no engine."""
    Page(page, folder, whole=False).run()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", pages_with("bash", "python"), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs_whole(page: Path, folder: Path) -> None:
    """Every command of the page, on tiny models."""
    run = Page(page, folder, whole=True)
    run.run()
    assert run.ran
