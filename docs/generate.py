"""Writes what is generated from the code: the recipe reference and the tree in README.md, and docs/recipe.schema.json.

python docs/generate.py            write them
python docs/generate.py --check    exit with status 1 where one of them is out of date
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from compress.commands.list import reference, schema_text

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SCHEMA = ROOT / "docs" / "recipe.schema.json"
FOLDERS = ("compress", "quantize", "distill", "prune", "export", "triton_repo")
OTHERS = {
    "recipes/": "recipes to run and to start from",
    "benchmarks/": "commands that reproduce every figure, and their results",
    "docs/": "how things were decided, and the generator of this tree",
    "tests/": "mirrors the packages; the slow tests use real data and the real server",
}


def readme(text: str) -> str:
    """Returns the README with its generated parts made anew."""
    text = re.sub(
        r"<!-- reference:begin -->.*<!-- reference:end -->",
        lambda _: f"<!-- reference:begin -->\n{reference()}\n<!-- reference:end -->",
        text,
        flags=re.S,
    )
    tree = "\n".join(tree_lines())
    return re.sub(
        r"<!-- tree:begin -->.*<!-- tree:end -->", lambda _: f"<!-- tree:begin -->\n```\n{tree}\n```\n<!-- tree:end -->", text, flags=re.S
    )


def tree_lines() -> Iterator[str]:
    """Yields the annotated tree: each module with the first sentence of its docstring."""
    yield f"{'cli.py':<28}{first_sentence(ROOT / 'cli.py')}"
    for folder in FOLDERS:
        yield f"{folder + '/':<28}{first_sentence(ROOT / folder / '__init__.py')}"
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.name != "__init__.py":
                yield f"{'  ' + path.name:<28}{first_sentence(path)}"
    for name, remark in OTHERS.items():
        yield f"{name:<28}{remark}"


def first_sentence(path: Path) -> str:
    """Returns the first sentence of the docstring of a module, cut to one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(docstring.split("\n\n")[0].split()), maxsplit=1)[0].rstrip(".:")
    return sentence if len(sentence) <= 110 else sentence[:107].rsplit(" ", 1)[0] + " ..."


def main() -> int:
    """Writes or checks; returns the exit status."""
    wanted = {README: readme(README.read_text(encoding="utf-8")), SCHEMA: schema_text() + "\n"}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date; run: python docs/generate.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
