"""The code blocks of README and documentation, and what a test does with each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("python-api.md",)
"""Pages that a test of their own runs, with other settings: tests/test_python_api.py."""
PAGES = [ROOT / "README.md", *sorted(page for page in ROOT.glob("docs/**/*.md") if page.name not in ELSEWHERE)]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S)
_COMMENT = re.compile(r"<!-- (?P<kind>not run|run by): (?P<told>[^>]+?) -->\s*\Z")
PROSE = ("text", "")
"""Languages of blocks that show output and are no code."""


@dataclass(frozen=True)
class Block:
    """One code block."""

    page: str
    """Path below the root."""
    line: int
    language: str
    title: str | None
    """The file that the block is."""
    body: str
    reason: str | None
    """Why it is not run; None where it is."""
    runner: str | None = None
    """The test that runs it, where the page alone cannot: a client of a server (`tests.docs.clients`)."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Returns the blocks of a page in order."""
    return tuple(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        info = found["info"].strip()
        title = re.search(r'title="([^"]+)"', info)
        comment = _COMMENT.search(text[: found.start()])
        indent = len(found["indent"])
        body = "".join(line[indent:] if line.strip() else line for line in found["body"].splitlines(keepends=True))
        yield Block(
            str(page.relative_to(ROOT)),
            text.count("\n", 0, found.start()) + 1,
            info.split(" ")[0].split("{")[0],
            title[1] if title else None,
            body,
            comment["told"] if comment and comment["kind"] == "not run" else None,
            comment["told"] if comment and comment["kind"] == "run by" else None,
        )


def every_block() -> list[Block]:
    """Returns the blocks of all pages."""
    return [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[str]:
    """Returns the commands of a shell block: continued lines joined, comments left out."""
    lines = re.sub(r"\\\n\s*", " ", block.body).splitlines()
    stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [line for line in stripped if line]


BASE: Mapping[str, Any] = {
    "name": "fragment",
    "model": {"path": "owner/model", "task": "text-classification"},
    "data": {"path": "owner/data"},
    "stages": [{"quantize": {}}, {"export": {}}],
}


def whole(fragment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe with a fragment in it."""
    completed = {**BASE, **fragment}
    if "model" in fragment and "data" in fragment and "name" in fragment:
        return dict(fragment)
    for key in ("model", "data"):
        if isinstance(fragment.get(key), Mapping) and not {"config", "path", "run"} & fragment[key].keys():
            completed[key] = {**BASE[key], **fragment[key]}
    if any("finetune" in entry for entry in completed["stages"] if isinstance(entry, dict)) and "model" not in fragment:
        completed["model"] = {**BASE["model"], "head": "new"}
    return completed


def check_recipe(block: Block) -> None:
    """Reads a YAML block as a recipe, or as a part of one.

    Raises:
        InputError: It is none.
    """
    from compress.recipe import check

    fragment = yaml.safe_load(block.body)
    assert isinstance(fragment, dict), f"{block}: a recipe is a map"
    fragment.pop("extends", None)
    check(whole(fragment))
